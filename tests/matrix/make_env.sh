#!/usr/bin/env bash
# Make an environment with a release of torch for a host without accelerators: 2 GB instead of 7.
#
#   tests/matrix/make_env.sh FOLDER PYTHON REQUIREMENT...
#
# PyPI has torch for CUDA only. Its libraries name CUDA's, 4 GB of them, which nothing calls here: cuda_stubs.py puts
# empty ones in their place. Requirements are pip's, `torch==2.9.0` or `-r FILE`, and are installed without what they
# depend on. Needs pip, gcc and readelf.
set -euo pipefail
folder=$1 python=$2 here=$(cd "$(dirname "$0")" && pwd)

for tool in gcc readelf; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: install gcc and binutils" >&2; exit 1; }
done

rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-deps --no-compile --no-cache-dir "${@:3}"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$folder/bin/python" "$here/cuda_stubs.py" "$site/torch/lib"
