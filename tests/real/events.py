"""Hears what engines publish, and waits until every router's view has it."""

import threading
import time

import zmq

from processes import call_json

QUIET = 0.1  # an engine's publisher is a thread beside the one that answers
BOUND = 0.5  # a view that is later than this is what the audit is for
POLL = 0.005


class Events:
    """The last message of each engine with the time of its arrival, and how long views took to have it."""

    def __init__(self, cluster):
        self.cluster, self.last, self.lags, self.late, self.measured = cluster, {}, [], 0, 0.0
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self.follow, args=(engine,), daemon=True) for engine in cluster.engines]
        for thread in self.threads:
            thread.start()

    def follow(self, engine):
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"tcp://127.0.0.1:{engine.events}")
        while not self.ended.is_set():
            if socket.poll(100):
                frames = socket.recv_multipart()
                self.last[f"{engine.url}#0"] = (int.from_bytes(frames[1], "big"), time.monotonic())
        socket.close(0)

    def stop(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def applied(self, published):
        """Whether the agent has taken these messages, made batches of them, and every router has applied the last batch."""
        sources = call_json(self.cluster.agent_url + "/status")["sources"]
        told = {name: sources[name] for name in published}
        if any(told[name]["outbox"] or (told[name]["engine_seq"] or -1) < seq for name, (seq, _) in published.items()):
            return False
        for router in self.cluster.router_urls:
            workers = {worker["source"]: worker for worker in call_json(router + "/cairn/status")["workers"]}
            for name, source in told.items():
                if workers[name]["incarnation"] != source["incarnation"] or workers[name]["applied_seq"] < (source["batch_seq"] or 0):
                    return False
        return True

    def settle(self):
        """Waits until nothing is on its way from an engine to a view; what isn't there within the bound stays for the audit to see."""
        began = time.monotonic()
        while True:
            published = dict(self.last)
            newest = max((at for _, at in published.values()), default=0.0)
            there = self.applied(published)
            now = time.monotonic()
            if there and newest > self.measured:
                self.lags.append(now - newest)
                self.measured = newest
            if there and now - max(newest, began) >= QUIET:
                return
            if now - began > BOUND:
                self.late += 1
                return
            time.sleep(POLL)

    def report(self):
        """Lags since the last report, in one line."""
        lags, late = sorted(self.lags), self.late
        self.lags, self.late = [], 0
        if not lags:
            return f"no event was on its way; {late} waits ended at their bound"
        p50, most = lags[len(lags) // 2], lags[-1]
        return f"from an engine's event to every view p50 {1_000 * p50:.0f} ms, max {1_000 * most:.0f} ms ({len(lags)} measured); {late} waits ended at their bound"
