"""Processes of a test: real engines and Cairn's roles, each started, waited for within a bound, and ended by its id."""

import ctypes
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VLLM_DIR = pathlib.Path(os.environ.get("CAIRN_VLLM_DIR") or pathlib.Path.home() / ".cache" / "cairn" / "vllm")
MODEL = "tiny"
START_SECONDS = 240  # imports take 25 CPU seconds an engine; several start at once on few cores
STOP_SECONDS = 30
BLOCK = 32  # the smallest block of vLLM's CPU attention


def computes_bfloat16():
    """Whether this processor multiplies matrices of bfloat16 fast. On x86 PyTorch does with AVX-512 alone: with AVX2 it takes three
    times as long as with float32."""
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return True
    return "avx512bw" in flags or "avx2" not in flags


# What engines compute in. Their KV is given in MiB of bfloat16; float32 gets twice that, for as many tokens.
DTYPE, KV_SCALE = ("bfloat16", 1) if computes_bfloat16() else ("float32", 2)

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent():
    """In a child: be asked to end when the test dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def skip(test, why):
    """Ends the test as skipped, loudly."""
    print(f"SKIPPED: {test}: {why}", file=sys.stderr)
    sys.exit(0)


def need_vllm(test):
    if not (VLLM_DIR / "ready").exists():
        skip(test, f"no vLLM in {VLLM_DIR}: run tests/real/setup.sh, or set CAIRN_VLLM_DIR")


def cairn_binary():
    """The program under test: CAIRN_BIN, else the release build."""
    given = os.environ.get("CAIRN_BIN")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    path = pathlib.Path(given) if given else target / "release" / "cairn"
    if not path.exists():
        sys.exit(f"{path} is missing: build it with cargo build --release, or set CAIRN_BIN")
    return path


def free_ports(count):
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def call(url, body=None, headers=None, timeout=120, method=None):
    """One HTTP request: (status, headers, body bytes). A refused connection raises."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def call_json(url, body=None, **more):
    status, _, answer = call(url, body, **more)
    if status != 200:
        raise RuntimeError(f"{url} answered {status}: {answer[:500].decode(errors='replace')}")
    return json.loads(answer) if answer else None


def wait_until(what, check, seconds):
    """Asks `check` until it gives something true; fails naming what was waited for."""
    end = time.monotonic() + seconds
    last = None
    while time.monotonic() < end:
        try:
            found = check()
            if found:
                return found
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            last = error
        time.sleep(0.1)
    raise TimeoutError(f"not within {seconds} s: {what} ({last})")


class Process:
    """A child in a session of its own, with its output in a file."""

    def __init__(self, name, command, folder, env=None):
        self.name, self.command, self.env = name, [str(part) for part in command], env
        self.log = pathlib.Path(folder) / f"{name}.log"
        self.child = None
        self.start()

    def start(self):
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, start_new_session=True, preexec_fn=die_with_parent)

    def alive(self):
        return self.child.poll() is None

    def tail(self, lines=15):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number):
        if self.alive():
            self.child.send_signal(number)

    def stop(self):
        """Asks to end, then kills; also what it left behind in its session."""
        self.signal(signal.SIGTERM)
        self.reap(STOP_SECONDS)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.reap(STOP_SECONDS)

    def reap(self, seconds):
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait(STOP_SECONDS)
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Engine(Process):
    """One real vLLM on CPU with KV events."""

    def __init__(self, name, folder, *, kv_mib=64, seqs=4, buffer_steps=10_000, arguments=(), env=None):
        self.port, self.events, self.replay = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "", "buffer_steps": buffer_steps,
            "endpoint": f"tcp://*:{self.events}", "replay_endpoint": f"tcp://*:{self.replay}"}
        own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        own |= {
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less
            "VLLM_CACHE_ROOT": str(VLLM_DIR / "cache"), "LD_LIBRARY_PATH": str(VLLM_DIR / "stubs")}
        command = [
            VLLM_DIR / "venv" / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", VLLM_DIR / "model",
            "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", self.port, "--dtype", DTYPE, "--max-model-len", 8192,
            "--max-num-seqs", seqs, "--block-size", BLOCK, "--kv-cache-memory-bytes", (kv_mib << 20) * KV_SCALE, "--enable-prefix-caching",
            "--enforce-eager", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events), *arguments]
        super().__init__(name, command, folder, own | (env or {}))

    def wait(self):
        def healthy():
            if not self.alive():
                sys.exit(f"{self.name} ended:\n{self.tail(30)}")
            return call(self.url + "/health", timeout=2)[0] == 200

        wait_until(f"{self.name} to be healthy", healthy, START_SECONDS)
        return self

    def metric(self, name):
        """The sum of a metric over its labels."""
        return metric(self.url, name)


def metric(url, name):
    lines = call(url + "/metrics")[2].decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
    return sum(values)


class Cluster:
    """Index nodes, one agent and routers in front of given engines, each a process of its own."""

    def __init__(self, engines, *, index=3, routers=2, otlp="", router_extra="", agent_engines=None):
        self.folder = tempfile.mkdtemp(prefix="cairn-real-")
        binary = cairn_binary()
        ports = free_ports(index + routers + 1 + index)
        self.index_ports, rest = ports[:index], ports[index:]
        self.router_ports, rest = rest[:routers], rest[routers:]
        agent_ops, index_ops = rest[0], rest[1:]
        telemetry = f'\n[telemetry]\notlp_endpoint = "{otlp}"\n'
        nodes = ", ".join(f'"http://127.0.0.1:{port}"' for port in self.index_ports)
        self.processes = []

        def start(name, role, text):
            path = pathlib.Path(self.folder) / f"{name}.toml"
            path.write_text(text)
            process = Process(name, [binary, role, "--config", path], self.folder)
            self.processes.append(process)
            return process

        peers = "".join(f'\n[[peers]]\nid = {i + 1}\naddress = "127.0.0.1:{port}"\n' for i, port in enumerate(self.index_ports))
        self.index = [
            start(f"index-{i + 1}", "index", f'cluster = "real"\nnode_id = {i + 1}\nlisten = "127.0.0.1:{port}"\nadvertise = "127.0.0.1:{port}"\n'
                  f'data_dir = "{self.folder}/index-{i + 1}"\nops_listen = "127.0.0.1:{index_ops[i]}"\n{peers}{telemetry}')
            for i, port in enumerate(self.index_ports)]
        followed = "".join(agent_engines or (f'\n[[engine]]\nurl = "{engine.url}"\n' for engine in engines))
        self.agent = start("agent-1", "agent", f'data_dir = "{self.folder}/agent-1"\nindex = [{nodes}]\n\n[agent]\nid = "agent-1"\nhost = "host-1"\n\n'
                           f'[ops]\nlisten = "127.0.0.1:{agent_ops}"\n{followed}{telemetry}')
        self.routers = [
            start(f"router-{i + 1}", "router", f'listen = "127.0.0.1:{port}"\nname = "router-{i + 1}"\nindex = [{nodes}]\nallow_policy_header = true\n'
                  f'data_dir = "{self.folder}/router-{i + 1}"\n{router_extra}\n{telemetry}')
            for i, port in enumerate(self.router_ports)]
        self.agent_url = f"http://127.0.0.1:{agent_ops}"
        self.router_urls = [f"http://127.0.0.1:{port}" for port in self.router_ports]
        self.engines = engines

    def wait(self, seconds=60):
        for url in self.router_urls:
            wait_until(f"{url} to see every engine", lambda url=url: self.sees_all(url), seconds)
        return self

    def sees_all(self, url):
        for process in self.processes:
            if not process.alive():
                sys.exit(f"{process.name} ended:\n{process.tail(30)}")
        workers = call_json(url + "/cairn/status")["workers"]
        fit = {w["engine_url"].rstrip("/") for w in workers if w["eligible"]}
        return all(engine.url in fit for engine in self.engines)

    def stop(self):
        for process in reversed(self.processes):
            process.stop()
