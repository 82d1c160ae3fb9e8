#!/usr/bin/env python3
"""The router's token ids equal a real vLLM's, over a hundred chats in six template styles and a list of text prompts.

Starts one vLLM (or uses the one at CAIRN_VLLM_URL, which must allow request templates) and runs crates/tokens' `encode` example over the same bodies.
`--record` also writes what the engine rendered into crates/tokens/tests/rendered.jsonl, against which `cargo test` compares without an engine.
"""

import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import processes
from processes import ROOT, VLLM_DIR, Engine, call, call_json
from prompts import TEMPLATES, TEXTS, cases

EQUAL_MIN = 100
RECORDED = ROOT / "crates" / "tokens" / "tests" / "rendered.jsonl"


def encoder():
    """The example under test, built."""
    given = os.environ.get("CAIRN_ENCODE")
    if given:
        return given
    subprocess.run(["cargo", "build", "--release", "-p", "cairn-tokens", "--example", "encode"], cwd=ROOT, check=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    return target / "release" / "examples" / "encode"


def compare(url):
    chats = cases()
    plain = [("plain", {"model": "tiny", "prompt": text}) for text in TEXTS] + [
        ("bare", {"model": "tiny", "prompt": text, "add_special_tokens": False}) for text in TEXTS]
    everything = chats + plain
    lines = "\n".join(json.dumps(body) for _, body in everything)
    today = datetime.date.today()
    ran = subprocess.run([encoder(), VLLM_DIR / "model"], input=lines, capture_output=True, text=True, check=True)
    ours = [json.loads(line) for line in ran.stdout.splitlines()]
    equal, refused, wrong, recorded = 0, 0, [], []
    for (name, body), mine in zip(everything, ours, strict=True):
        status, _, answer = call(url + "/tokenize", body)
        theirs = json.loads(answer)
        if status != 200:
            refused += "error" in mine
            if "error" not in mine:
                wrong.append((name, body, "only the engine refuses: " + json.dumps(theirs)[:300]))
        elif mine.get("tokens") == theirs["tokens"]:
            equal += 1
            if "messages" in body:
                text = call_json(url + "/detokenize", {"model": "tiny", "tokens": theirs["tokens"]})["prompt"]
                recorded.append({"template": name, "body": {k: v for k, v in body.items() if k not in ("chat_template", "model")}, "text": text})
        else:
            wrong.append((name, body, f"ours: {mine.get('error') or len(mine['tokens'])}, theirs: {len(theirs['tokens'])} tokens"))
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


def main():
    url = os.environ.get("CAIRN_VLLM_URL")
    if url:
        return compare(url)
    processes.need_vllm("tokens.py")
    with tempfile.TemporaryDirectory(prefix="cairn-tokens-") as folder:
        engine = Engine("engine", folder, kv_mib=32, seqs=2, arguments=["--trust-request-chat-template"])
        try:
            compare(engine.wait().url)
        finally:
            engine.stop()


main()
