#!/usr/bin/env python3
"""The router's token ids equal a real vLLM's, over a hundred chats in six template styles and a list of text prompts.

Starts one vLLM (or uses the one at CAIRN_VLLM_URL, which must allow request templates), a router in front of it, and asks both for the ids of the same
bodies: `/tokenize` and `/cairn/explain?token_ids=true`.
`--record` also writes what the engine rendered into crates/tokens/tests/rendered.jsonl, against which `cargo test` compares without an engine.
"""

import datetime
import json
import os
import sys
import tempfile
import types

import processes
from processes import MODEL, ROOT, Cluster, Engine, call, call_json, wait_until
from prompts import TEMPLATES, TEXTS, cases

EQUAL_MIN = 100
RECORDED = ROOT / "crates" / "tokens" / "tests" / "rendered.jsonl"
# The engine's own flag, and time enough for every encode on a loaded machine.
ROUTER = f'''
tokenize_budget_ms = 10000

[[pool]]
name = "{MODEL}"
trust_request_chat_template = true
'''


def uses_own_tokenizer(router):
    """Whether the ids are the router's own: where its tokenizer is missing or gives others, it asks the engine."""
    pools = call_json(router + "/cairn/status")["pools"]
    return [pool["pool"] for pool in pools] == [MODEL] and "gives the engine's ids" in pools[0]["tokenizer"]


def routers_ids(router, body):
    """The ids of a body with one prompt; None where the router makes none of it, as of a chat that the template refuses."""
    told = call_json(router + "/cairn/explain?token_ids=true", body)
    return None if told["degraded"] else told["token_ids"][0]


def compare(url, router):
    wait_until("the router to use its own tokenizer", lambda: uses_own_tokenizer(router), 30)
    chats = cases()
    plain = [("plain", {"model": "tiny", "prompt": text}) for text in TEXTS] + [
        ("bare", {"model": "tiny", "prompt": text, "add_special_tokens": False}) for text in TEXTS]
    everything = chats + plain
    today = datetime.date.today()
    equal, refused, wrong, recorded = 0, 0, [], []
    for name, body in everything:
        mine = routers_ids(router, body)
        status, _, answer = call(url + "/tokenize", body)
        theirs = json.loads(answer)
        if status != 200:
            refused += mine is None
            if mine is not None:
                wrong.append((name, body, "only the engine refuses: " + json.dumps(theirs)[:300]))
        elif mine == theirs["tokens"]:
            equal += 1
            if "messages" in body:
                text = call_json(url + "/detokenize", {"model": "tiny", "tokens": theirs["tokens"]})["prompt"]
                recorded.append({"template": name, "body": {k: v for k, v in body.items() if k not in ("chat_template", "model")}, "text": text})
        else:
            wrong.append((name, body, f"ours: {mine and len(mine)}, theirs: {len(theirs['tokens'])} tokens"))
    for name, body, why in wrong:
        print(f"DIFFERENT: {name}: {why}\n  {json.dumps({k: v for k, v in body.items() if k != 'chat_template'})[:600]}")
    chat_equal = equal - len(plain)
    print(f"{chat_equal} chats and {len(plain)} text prompts equal, {refused} refused by both, {len(wrong)} different; {len(TEMPLATES)} templates")
    if "--record" in sys.argv:
        if today != datetime.date.today():
            sys.exit("midnight passed: record again")
        head = {"recorded_on": today.isoformat()}
        RECORDED.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [head, *recorded]))
    if wrong or chat_equal < EQUAL_MIN:
        sys.exit(1)


def behind_router(engine):
    cluster = Cluster([engine], index=1, routers=1, router_extra=ROUTER)
    try:
        compare(engine.url, cluster.wait().router_urls[0])
    finally:
        cluster.stop()


def main():
    url = os.environ.get("CAIRN_VLLM_URL")
    if url:
        return behind_router(types.SimpleNamespace(url=url.rstrip("/")))
    processes.need_vllm("tokens.py")
    with tempfile.TemporaryDirectory(prefix="cairn-tokens-") as folder:
        engine = Engine("engine", folder, kv_mib=32, seqs=2, arguments=["--trust-request-chat-template"])
        try:
            behind_router(engine.wait())
        finally:
            engine.stop()


main()
