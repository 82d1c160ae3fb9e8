#!/usr/bin/env bash
# Real vLLM engines on CPU behind a real cluster: token ids, hits against the engines' own counters, and a split over NIXL.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${CAIRN_VLLM_DIR:-$HOME/.cache/cairn/vllm}
[ -x "$dir/venv/bin/python" ] || { echo "SKIPPED: real engines: run tests/real/setup.sh first" >&2; exit 0; }

for test in tokens a3 a4; do
    echo "== tests/real/$test.py"
    "$dir/venv/bin/python" "$here/$test.py"
done
