#!/usr/bin/env python3
"""What `cairn replay` says comes true: three real vLLM engines and the replay's default model get the same requests.

300 requests on 16 shared prefixes of 2,048 tokens, 4 at a time, under four policies, and one at a time under round-robin over more
prefixes than the engines' caches hold, so that what is evicted decides:
- hit rates agree within a point;
- policies whose measured hit rates are more than 3 points apart come out in the same order.
"""

import itertools
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import processes
from a3 import Load, empty, tokens
from processes import BLOCK, Cluster, Engine, cairn_binary, call, wait_until

# Each prefix is used often enough that every engine gets it under `random`: its hit rate is then hardly left to chance.
GROUPS, PREFIX, TAIL, REQUESTS = 16, 2_048, 64, 300
PROMPT = PREFIX + TAIL
KV_MIB = 128  # each engine holds all of them, so nothing is evicted
POLICIES = ("kv", "prefix", "round-robin", "random")
AT_ONCE = 4
APART = 10  # places between a prefix's first use and its second: what is only on its way is another test's
POINTS, CLEARLY = 1.0, 3.0
GAP_MS = 250  # between two requests of the replayed trace: its engines are as idle as the real ones
OVERFULL = 1.5  # prefixes of the last row, as a multiple of what one cache holds
SEEDS = 5


def order(seed, groups):
    """Which prefix each request has."""
    dice = random.Random(seed)
    out, first = [], {}
    while len(out) < REQUESTS:
        group = dice.randrange(groups)
        if first.setdefault(group, len(out)) + APART > len(out) > first[group]:
            continue
        out.append(group)
    return out


def prompts(seed, groups):
    prefixes = [tokens(1_000_000 * seed + group, PREFIX) for group in range(groups)]
    return [prefixes[group] + tokens(77_000_000 + 100_000 * seed + n, TAIL) for n, group in enumerate(order(seed, groups))]


def trace(path, seed, groups):
    """The same requests as a trace: ids stand for blocks of the engines' size."""
    with open(path, "w") as out:
        for n, group in enumerate(order(seed, groups)):
            shared = [1_000 * (group + 1) + at for at in range(PREFIX // BLOCK)]
            own = [10_000_000 + 100 * n + at for at in range(TAIL // BLOCK)]
            row = {"timestamp": GAP_MS * n, "input_length": PROMPT, "output_length": 4, "hash_ids": shared + own, "session_id": group}
            out.write(json.dumps(row) + "\n")


def replayed(path, policies, capacity):
    """Hit rates by policy, each the mean over seeds."""
    command = [
        cairn_binary(), "replay", "--trace", path, "--trace-block", BLOCK, "--model", "default", "--engines", 3, "--block-size", BLOCK,
        "--capacity-tokens", capacity, "--policies", ",".join(policies), "--seeds", SEEDS, "--json"]
    ran = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    runs = json.loads(ran.stdout)["runs"]
    return {policy: sum(run["hit"] for run in runs if run["policy"] == policy) / SEEDS for policy in policies}


def measured(load, engines, work, policy, at_once):
    empty(engines)
    started = time.monotonic()
    done = load.run(work, policy, workers=at_once)
    print(f"{policy}: {len(done)} requests in {time.monotonic() - started:.1f} s", flush=True)
    wait_until("the engines to be idle", lambda: sum(e.metric("vllm:num_requests_running") for e in engines) == 0, 10)
    return sum(answer["cached"] for answer in done) / (len(work) * PROMPT)


def capacity_of(engine):
    """Tokens that its cache holds: all blocks but the null block."""
    page = call(engine.url + "/metrics")[2].decode()
    line = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info"))
    blocks = int(line.split('num_gpu_blocks="')[1].split('"')[0])
    return (blocks - 1) * BLOCK


def judge(real, said):
    problems = []
    print(f"{'':24s}  measured  replayed")
    for name in real:
        print(f"{name:24s}  {100 * real[name]:6.2f} %  {100 * said[name]:6.2f} %")
        if abs(real[name] - said[name]) * 100 > POINTS:
            problems.append(f"{name}: {100 * real[name]:.2f} % measured, {100 * said[name]:.2f} % replayed")
    for a, b in itertools.combinations(POLICIES, 2):
        if abs(real[a] - real[b]) * 100 > CLEARLY and (real[a] > real[b]) != (said[a] > said[b]):
            problems.append(f"{a} and {b} come out in another order")
    return problems


def main():
    processes.need_vllm("replay.py")
    with tempfile.TemporaryDirectory(prefix="cairn-replay-") as folder:
        engines, cluster = [], None
        try:
            for n in range(3):
                engines.append(Engine(f"engine-{n + 1}", folder, kv_mib=KV_MIB))
            for engine in engines:
                engine.wait()
            # One router: with two, which of them counts first would decide who goes round with whom.
            cluster = Cluster(engines, routers=1).wait()
            capacity = capacity_of(engines[0])
            print(f"three engines of {capacity} tokens and the cluster are up; logs in {folder} and {cluster.folder}", flush=True)
            load = Load(cluster, None)  # audits are a3.py's
            work = prompts(1, GROUPS)
            real = {policy: measured(load, engines, work, policy, AT_ONCE) for policy in POLICIES}
            path = pathlib.Path(folder) / "shared.jsonl"
            trace(path, 1, GROUPS)
            said = replayed(path, POLICIES, capacity)
            many = round(OVERFULL * capacity / PROMPT)
            name = f"round-robin, {many} prefixes"
            real[name] = measured(load, engines, prompts(2, many), "round-robin", 1)
            path = pathlib.Path(folder) / "overfull.jsonl"
            trace(path, 2, many)
            said[name] = replayed(path, ["round-robin"], capacity)["round-robin"]
            problems = judge(real, said)
        finally:
            if cluster:
                cluster.stop()
            for engine in engines:
                engine.stop()
    for problem in problems:
        print(f"FAILED: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
