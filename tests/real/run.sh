#!/usr/bin/env bash
# Real vLLM engines on CPU behind a real cluster: token ids, hits against the engines' own counters, and a split over NIXL whose
# trace is read back from a real Jaeger where JAEGER_BIN names one; and their hit rates beside what the replay says. Arguments: which of
# tokens, a3, replay, a4 to run; all without any.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${CAIRN_VLLM_DIR:-$HOME/.cache/cairn/vllm}
python=$dir/venv/bin/python
[ -x "$python" ] || { echo "SKIPPED: real engines: run tests/real/setup.sh first" >&2; exit 0; }

# The tests' build has made the encoder already; without it tokens.py builds it.
encode=$here/../../target/release/examples/encode
if [ -z "${CAIRN_ENCODE:-}" ] && [ -x "$encode" ]; then
    export CAIRN_ENCODE=$encode
fi

if [ -n "${JAEGER_BIN:-}" ] && [ -z "${JAEGER_QUERY:-}" ]; then
    read -r JAEGER_HTTP_PORT JAEGER_GRPC_PORT JAEGER_OTLP_PORT < <("$python" -c 'import socket
held = [socket.socket() for _ in range(3)]
for s in held: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in held))')
    export JAEGER_HTTP_PORT JAEGER_GRPC_PORT JAEGER_OTLP_PORT
    "$JAEGER_BIN" --config "$here/jaeger.yaml" > /dev/null 2>&1 &
    jaeger=$!
    trap 'kill $jaeger 2> /dev/null || true' EXIT
    export JAEGER_QUERY=http://127.0.0.1:$JAEGER_HTTP_PORT JAEGER_OTLP=http://127.0.0.1:$JAEGER_OTLP_PORT
fi

[ $# -gt 0 ] || set -- tokens a3 replay a4
for test in "$@"; do
    echo "== tests/real/$test.py"
    timeout 1500 "$python" -u "$here/$test.py"
done
