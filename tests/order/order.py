#!/usr/bin/env python3
"""Writes crates/cairn/order.ld: the functions that a request walks through, in the order of the walk.

A request runs through 700 functions, which the linker would spread over 22 MB; a processor that has just come back from the kernel
waits for each of them. Side by side they take 1 MB. Run this after a larger change of the router's path or of the libraries on
it, and compare `cairn bench router` before and after:

    python3 tests/order/order.py

It builds the workspace with a map of the link, runs a router under valgrind (which must be installed) in front of a small cluster,
sends whole and streamed requests that share system messages, and keeps what ran at least once in every second request. Patterns
name a library and a function without its hash, so they survive other versions; one that no longer matches is without effect.
"""

import collections
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
CAIRN = TARGET / "release" / "cairn"
ORDER = ROOT / "crates" / "cairn" / "order.ld"
REQUESTS = {"whole": 300, "stream": 60}
WORDS = "alpha bravo cache delta engine fox graph hotel index jolt kappa lemon model node oscar prefix queue router token".split()
HASH = re.compile(r"17h[0-9a-f]{16}E(\.llvm\.\d+)?$")
CRATE = re.compile(r"^_RNvCs[0-9A-Za-z]+_")  # the newer mangling, of the allocator's shims: the crate's hash comes first


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def send(port, model, kind, count):
    """Requests of about 2 KiB, one after the other on one connection."""
    pick = random.Random(1)
    systems = [" ".join(pick.choices(WORDS, k=260))[:1500] for _ in range(8)]
    client = http.client.HTTPConnection("127.0.0.1", port)
    for i in range(count):
        user = " ".join(pick.choices(WORDS, k=60))[:340] + f" {kind} {i}"
        messages = [{"role": "system", "content": systems[i % 8]}, {"role": "user", "content": user}]
        body = {"model": model, "messages": messages, "max_tokens": 16, "stream": kind == "stream"}
        client.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = client.getresponse()
        text = answer.read()
        if answer.status != 200:
            sys.exit(f"the router answered {answer.status}: {text[:300]}")


def control(pid, *what):
    subprocess.run(["callgrind_control", *what, str(pid)], check=True, stdout=subprocess.DEVNULL)


def profile(folder, kind):
    """callgrind's files of a router's threads, one for each."""
    port = free_port()
    up = subprocess.Popen(
        [CAIRN, "up", "--engines", "sim:4", "--index-nodes", "1", "--routers", "1", "--port", str(free_port())]
        + ["--data", folder / f"{kind}.data", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    router = None
    try:
        ready = json.loads(up.stdout.readline())
        config = folder / f"{kind}.toml"
        config.write_text(f'listen = "127.0.0.1:{port}"\nname = "order"\nindex = ["{ready["index"][0]}"]\npolicy = "kv"\n')
        out = folder / f"{kind}.out"
        tool = ["valgrind", "--tool=callgrind", "--demangle=no", "--separate-threads=yes", "--instr-atstart=no"]
        router = subprocess.Popen(
            [*tool, f"--callgrind-out-file={out}", CAIRN, "router", "--config", config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        model = wait_for_model(port, router)
        send(port, model, kind, 50)
        control(router.pid, "-i", "on")
        send(port, model, kind, REQUESTS[kind])
        control(router.pid, "-i", "off")
        control(router.pid, "-d")
        return list(folder.glob(f"{kind}.out.*"))
    finally:
        for process in (router, up):
            if process is not None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def wait_for_model(port, router):
    """The model that the router serves, once it knows an engine of it."""
    for _ in range(120):
        time.sleep(1)
        if router.poll() is not None:
            sys.exit(f"the router ended with {router.returncode}")
        try:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            client.request("GET", "/v1/models")
            models = json.loads(client.getresponse().read()).get("data")
        except OSError:
            continue
        if models:
            return models[0]["id"]
    sys.exit("the router knew no engine within two minutes")


class Thread:
    """What one thread ran: instructions and calls by function, and who called whom."""

    def __init__(self, path):
        self.names = {}
        self.own = collections.Counter()
        self.calls = collections.Counter()
        self.below = collections.defaultdict(collections.Counter)
        function = callee = None
        for line in path.read_text().splitlines():
            if line.startswith("fn="):
                function = self.name(line[3:])
            elif line.startswith("cfn="):
                callee = self.name(line[4:])
            elif line.startswith("calls="):
                self.calls[callee] += int(line[6:].split()[0])
            elif line[:1] in "+-*0123456789" and " " in line:
                cost = int(line.split()[1])
                if callee is None:
                    self.own[function] += cost
                else:
                    self.below[function][callee] += cost
                    callee = None

    def name(self, text):
        """callgrind writes a name once, then its number; the levels of a recursion are one function here."""
        number, _, name = text.partition(" ")
        if name:
            self.names[number] = re.sub(r"'\d+$", "", name)
        return self.names[number]

    def total(self):
        return sum(self.own.values())

    def walk(self, at_least):
        """Functions, depth first from the dearest, the dearest callee first."""
        cost = {f: self.own[f] + sum(self.below[f].values()) for f in self.own}
        seen = dict()
        for root in sorted(cost, key=cost.get, reverse=True):
            stack = [root]
            while stack:
                function = stack.pop()
                if function in seen:
                    continue
                seen[function] = None
                stack.extend(f for f, _ in reversed(self.below[function].most_common()))
        return [f for f in seen if self.calls[f] >= at_least or cost[f] >= self.total() / 100]


def sections(path):
    """From the link's map: which file each function's section came from."""
    found = {}
    for line in path.read_text(errors="replace").splitlines():
        match = re.search(r"(\S+):\(\.text\.(\S+)\)$", line)
        if match:
            found[match[2]] = match[1]
    return found


def pattern(function, file):
    """A linker's pattern for the function's section: its library and its own name, both without hashes."""
    library = re.search(r"/([^/]+)-[0-9a-f]{16}\.rlib\(", file)
    where = f"*{library[1]}-*.rlib:*" if library else "*"  # else: an object of the program itself
    name = CRATE.sub("_RNvCs*_", HASH.sub("17h*", function))
    return f"{where}(.text.{name})"


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        link_map = folder / "link.map"
        environment = os.environ | {"CAIRN_LINK_MAP": str(link_map)}
        subprocess.run(["cargo", "build", "--release", "--workspace"], cwd=ROOT, env=environment, check=True)
        files = sections(link_map)
        lines = dict()
        for kind, count in REQUESTS.items():
            lane = max((Thread(path) for path in profile(folder, kind)), key=Thread.total)
            print(f"{kind}: {lane.total() // count} instructions a request")
            for function in lane.walk(count // 2):
                if function in files:
                    lines[pattern(function, files[function])] = None
    text = "".join(f"    {line}\n" for line in lines)
    ORDER.write_text(
        "/* The functions that a request walks through, side by side and in the order of the walk. Written by tests/order/order.py. */\n"
        f"SECTIONS\n{{\n  .text.request :\n  {{\n{text}  }}\n}}\nINSERT BEFORE .text\n"
    )
    print(f"{len(lines)} functions in {ORDER.relative_to(ROOT)}")


main()
