#!/usr/bin/env bash
# Make an environment with torch_xla for a host without accelerators: 2 GB instead of 7.
#
#   tests/xla/make_env.sh FOLDER [PYTHON]
#
# torch_xla 2.9 needs the torch 2.9 of its own ABI, which PyPI has for CUDA only. Its libraries name CUDA's, 4 GB of them,
# which nothing calls here: cuda_stubs.py puts empty ones in their place. Needs pip, gcc and readelf.
set -euo pipefail
folder=$1 python=${2:-python3} here=$(cd "$(dirname "$0")" && pwd)

"$python" -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}: torch_xla 2.9 has wheels for 3.11 to 3.13; make PYTHON=/path/to/python3.x")'
for tool in gcc readelf; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: install gcc and binutils" >&2; exit 1; }
done

rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-deps --no-compile --no-cache-dir -r "$here/requirements.txt"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$folder/bin/python" "$here/cuda_stubs.py" "$site/torch/lib"
PJRT_DEVICE=CPU "$folder/bin/python" -c 'import torch, torch_xla; assert torch.ones(2, device="xla").sum().item() == 2'
