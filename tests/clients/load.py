#!/usr/bin/env python3
"""The unmodified load tool aiperf against a router: every request must succeed.

CAIRN_ROUTER_URL names the router; run with the Python that tests/clients/setup.sh made. CAIRN_LOAD_REQUESTS sets how many requests.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

URL = os.environ.get("CAIRN_ROUTER_URL", "").rstrip("/")
REQUESTS = int(os.environ.get("CAIRN_LOAD_REQUESTS", "60"))
SECONDS = 300
CLIENTS = pathlib.Path(os.environ.get("CAIRN_CLIENTS_DIR") or pathlib.Path.home() / ".cache" / "cairn" / "clients")


def main():
    if not URL:
        print("SKIPPED: load.py: set CAIRN_ROUTER_URL to a running router", file=sys.stderr)
        return
    with urllib.request.urlopen(URL + "/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    environment = os.environ | {"HF_HOME": str(CLIENTS / "huggingface"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="cairn-load-") as folder:
        command = [
            pathlib.Path(sys.executable).parent / "aiperf", "profile", "--model", model, "--url", URL, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", "cairn/demo", "--concurrency", "4", "--request-count", str(REQUESTS), "--prompt-input-tokens-mean", "256",
            "--prompt-output-tokens-mean", "16", "--artifact-dir", folder, "--random-seed", "1", "--ui-type", "none"]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        report = pathlib.Path(folder) / "profile_export_aiperf.json"
        if ran.returncode or not report.exists():
            sys.exit(f"aiperf ended with {ran.returncode}:\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}")
        report = json.loads(report.read_text())
    done = int(report["request_count"]["avg"])
    errors = report["error_summary"]
    ttft = report["time_to_first_token"]
    print(f"aiperf: {done} of {REQUESTS} requests, {len(errors)} kinds of errors, time to first token p50 {ttft['p50']:.1f} ms, p99 {ttft['p99']:.1f} ms")
    if done != REQUESTS or errors:
        sys.exit(f"aiperf reports errors: {json.dumps(errors)[:1000]}")


main()
