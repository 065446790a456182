#!/usr/bin/env bash
# Create an environment with a release of torch for a host without accelerators: 2 GB instead of 7.
#
#   tests/matrix/make_env.sh FOLDER PYTHON REQUIREMENT...
#
# PyPI has torch for Linux with CUDA only. Its libraries are linked with 4 GB of CUDA libraries, which are never called on
# such a host; cuda_stubs.py replaces them by empty libraries. Requirements are those of pip (`torch==2.9.0` or
# `-r FILE`), and are installed without their dependencies. Needs pip, gcc and readelf.
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
