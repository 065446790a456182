#!/usr/bin/env bash
# Create an environment with torch_xla for a host without accelerators.
#
#   tests/xla/make_env.sh FOLDER [PYTHON]
#
# torch_xla 2.9 needs torch 2.9 with the same ABI, which PyPI has for CUDA only; tests/matrix/make_env.sh replaces the
# CUDA libraries.
set -euo pipefail
folder=$1 python=${2:-python3} here=$(cd "$(dirname "$0")" && pwd)

"$python" -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}: torch_xla 2.9 has wheels for 3.11 to 3.13; make PYTHON=/path/to/python3.x")'
"$here/../matrix/make_env.sh" "$folder" "$python" -r "$here/requirements.txt"
PJRT_DEVICE=CPU "$folder/bin/python" -c 'import torch, torch_xla; assert torch.ones(2, device="xla").sum().item() == 2'
