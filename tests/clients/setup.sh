#!/usr/bin/env bash
# Installs unmodified clients to test a router with: the OpenAI Python SDK and the load tool aiperf. Needs Python 3.10 or later.
# Everything lands in $CAIRN_CLIENTS_DIR (default ~/.cache/cairn/clients), 0.9 GB; a second run finds it there and does nothing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${CAIRN_CLIENTS_DIR:-$HOME/.cache/cairn/clients}
assets="$here/../../crates/tokens/assets"
stamp="$dir/ready"
wanted=$(cat "$here/setup.sh" "$here/requirements.txt" "$assets"/* | cksum)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "clients are ready in $dir"
    exit 0
fi
mkdir -p "$dir"
rm -f "$stamp"
[ -x "$dir/boot/bin/uv" ] || { python3 -m venv "$dir/boot" && "$dir/boot/bin/pip" -q install uv; }
[ -x "$dir/venv/bin/python" ] || "$dir/boot/bin/uv" venv -q "$dir/venv"
"$dir/boot/bin/uv" pip install -q --python "$dir/venv/bin/python" -r "$here/requirements.txt"

# aiperf counts tokens with a tokenizer that it looks up by name; a local cache in the hub's layout gives it ours without a network.
hub="$dir/huggingface/hub/models--cairn--demo"
mkdir -p "$hub/refs" "$hub/snapshots/0"
printf 0 > "$hub/refs/main"
cp "$assets"/* "$hub/snapshots/0/"
printf '{"model_type": "llama"}\n' > "$hub/snapshots/0/config.json"
echo "$wanted" > "$stamp"
echo "clients are ready in $dir"
