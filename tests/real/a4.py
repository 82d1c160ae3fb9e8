#!/usr/bin/env python3
"""A request split between a prefill and a decode engine gives the text that one engine gives; both legs are in one trace.

Two real vLLMs move KV blocks over NIXL. A split pays where the decode engine has answers to write that a prefill would hold up, so some are
running there when each request comes; they are left as soon as it is being computed, so that nothing else shares the batches whose text is
compared. Set JAEGER_QUERY (such as http://127.0.0.1:16686) and JAEGER_OTLP (such as http://127.0.0.1:4317) to check
the trace in a running Jaeger; without them that part is skipped, loudly.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import sys
import tempfile
import urllib.request

import processes
from a3 import tokens
from processes import MODEL, Cluster, Engine, call, call_json, free_ports, wait_until

LENGTHS = (5_500, 6_500, 7_500)
RUNNING = 3  # answers that a prefill on the decode engine would hold up
ATTEMPTS = 5


def engine(name, folder, role):
    """An engine that can send or receive blocks."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0])}
    started = Engine(name, folder, arguments=["--kv-transfer-config", json.dumps(transfer)], env=side)
    started.role = role
    return started


def followed(engines):
    return [f'\n[[engine]]\nurl = "{e.url}"\nrole = "{e.role}"\n' for e in engines]


def spans(query, trace_id):
    found = call_json(f"{query}/api/traces/{trace_id}")["data"]
    return [span["operationName"] for span in found[0]["spans"]] if found else []


@contextlib.contextmanager
def answers_running(url):
    """Answers that are being streamed; they are left at the end."""
    with contextlib.ExitStack() as streams:
        for n in range(RUNNING):
            body = {"model": MODEL, "prompt": tokens(700 + n, 64), "max_tokens": 4_000, "temperature": 0, "ignore_eos": True, "stream": True}
            sent = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
            streams.enter_context(urllib.request.urlopen(sent, timeout=60)).readline()
        yield


def split(url, engines, body, headers):
    """The answer to a request that comes while the decode engine is writing others."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with answers_running(url):
            sent = pool.submit(call, url + "/v1/completions", body, headers)
            wait_until("the request at an engine", lambda: sent.done() or at_work(engines) > RUNNING, 60)
        return sent.result()


def at_work(engines):
    return sum(e.metric(f"vllm:num_requests_{state}") for e in engines for state in ("running", "waiting"))


def check(n, length, engines, url, query):
    """Problems with a prompt of `length` tokens; one that wasn't split, because speeds aren't known yet, is followed by another."""
    for attempt in range(ATTEMPTS):
        body = {"model": MODEL, "prompt": tokens(900 + 10 * n + attempt, length), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        trace_id = f"{0xA4000 + 16 * n + attempt:032x}"
        status, _, answer = split(url, engines, body, {"traceparent": f"00-{trace_id}-00000000000000a4-01"})
        if status != 200:
            return [f"{length} tokens: status {status}: {answer[:300]!r}"]
        text = json.loads(answer)["choices"][0]["text"]
        plan = next(d for d in call_json(url + "/cairn/decisions?limit=10")["decisions"] if d["trace_id"] == trace_id)
        if not plan["decode"]:
            print(f"{length} tokens: {plan['reason']}", flush=True)
            continue
        call_json(engines[0].url + "/reset_prefix_cache", b"", method="POST")
        whole = call_json(engines[0].url + "/v1/completions", body)["choices"][0]["text"]
        print(f"{length} tokens: {'same' if text == whole else 'DIFFERENT'} text, {plan['reason']}", flush=True)
        if text != whole:
            return [f"{length} tokens: the split answer differs"]
        return trace(query, trace_id) if query else []
    return [f"{length} tokens: none of {ATTEMPTS} requests was split"]


def trace(query, trace_id):
    """Problems with the trace: both legs belong there."""
    def both():
        seen = spans(query, trace_id)
        return {"prefill", "decode"} <= {name.split(".")[-1] for name in seen} and seen

    try:
        print(f"  trace {trace_id}: {sorted(set(wait_until('the trace in Jaeger', both, 20)))}", flush=True)
        return []
    except TimeoutError as error:
        return [f"{error}: {spans(query, trace_id)}"]


def main():
    processes.need_vllm("a4.py")
    otlp, query = os.environ.get("JAEGER_OTLP", ""), os.environ.get("JAEGER_QUERY", "")
    problems = []
    with tempfile.TemporaryDirectory(prefix="cairn-a4-") as folder:
        engines, cluster = [], None
        try:
            engines = [engine("prefill", folder, "prefill"), engine("decode", folder, "decode")]
            for each in engines:
                each.wait()
            cluster = Cluster(engines, routers=1, otlp=otlp, router_extra="split = true", agent_engines=followed(engines)).wait()
            url = cluster.router_urls[0]
            for n, length in enumerate(LENGTHS):
                problems += check(n, length, engines, url, query)
            moved = transferred(engines[1])
            print(f"{moved:.0f} prompt tokens transferred", flush=True)
            if moved < sum(LENGTHS) - len(LENGTHS) * 64:
                problems.append(f"only {moved:.0f} tokens were transferred by requests of {LENGTHS}")
            if not query:
                print("SKIPPED: a4.py, the trace: set JAEGER_QUERY and JAEGER_OTLP", file=sys.stderr)
        finally:
            if cluster:
                cluster.stop()
            for each in engines:
                each.stop()
    for problem in problems:
        print(f"FAILED: {problem}")
    sys.exit(bool(problems))


def transferred(engine):
    """Prompt tokens that the engine took over from another one."""
    lines = call(engine.url + "/metrics")[2].decode().splitlines()
    own = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total") and "external_kv_transfer" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in own)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
