#!/usr/bin/env bash
# Drives a whole cluster (`cairn up`) with unmodified clients: the OpenAI Python SDK and the load tool aiperf.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${CAIRN_CLIENTS_DIR:-$HOME/.cache/cairn/clients}
cairn=${CAIRN_BIN:-$here/../../target/release/cairn}
[ -f "$dir/ready" ] || { echo "SKIPPED: real clients: run tests/clients/setup.sh first" >&2; exit 0; }

work=$(mktemp -d)
"$cairn" up --port 0 --json --sim-speed 20 > "$work/ready" &
up=$!
trap 'kill -INT $up 2>/dev/null || true; wait $up 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in $(seq 600); do
    [ -s "$work/ready" ] && break
    kill -0 $up || exit 1
    sleep 0.1
done
CAIRN_ROUTER_URL=$(sed -n 's/.*"routers":\["\([^"]*\)".*/\1/p' "$work/ready")
export CAIRN_ROUTER_URL

"$dir/venv/bin/python" "$here/test_openai.py"
"$dir/venv/bin/python" "$here/load.py"
