#!/usr/bin/env bash
# Cross-compile the core for aarch64, run every op under qemu, and compare the bits of the results with those of this
# machine's generic instruction set. `make aarch64` calls this script.
#
#   tests/aarch64/run.sh PYTHON CMAKE NINJA
#
# Needs Debian or Ubuntu with g++-aarch64-linux-gnu and qemu-user-static. An aarch64 Python is unpacked into
# build/aarch64/root; nothing is installed.
set -euo pipefail
python=$1 cmake=$2 ninja=$3 here=$(cd "$(dirname "$0")" && pwd) build=$PWD/build/aarch64
for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get dpkg; do
    command -v "$tool" > /dev/null || { echo "$tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user-static (on Debian or Ubuntu)" >&2; exit 1; }
done

echo "Compiling the core for aarch64 (two minutes)"
mkdir -p "$build"
"$cmake" -S . -B "$build" -G Ninja --toolchain "$here/toolchain.cmake" -DCMAKE_MAKE_PROGRAM="$ninja" \
    -Dpybind11_DIR="$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())')" \
    -DPYTHON_EXECUTABLE="$python" -DPython3_EXECUTABLE="$python" -DPYENGINE_CUDA=OFF -DPYENGINE_WERROR=ON > "$build/cmake.log"
"$cmake" --build "$build" --target _core > "$build/build.log" || { cat "$build/build.log"; exit 1; }

# The package lists of the other architecture, in a separate folder.
version=$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}")')
apt=$build/apt root=$build/root
if [ ! -x "$root/usr/bin/$version" ]; then
    echo "Unpacking $version for aarch64 into $root"
    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$root"
    touch "$apt/state/status"
    cat > "$apt/apt.conf" << CONF
APT::Architecture "arm64";
APT::Architectures {"arm64";};
Dir::State "$apt/state";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt/cache";
CONF
    apt-get -qq -c "$apt/apt.conf" update
    (cd "$apt/debs" && apt-get -qq -c "$apt/apt.conf" download "$version-minimal" "lib$version-minimal" "lib$version-stdlib" \
        libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 2> "$apt/download.log") || { cat "$apt/download.log"; exit 1; }
    for package in "$apt"/debs/*.deb; do dpkg -x "$package" "$root"; done
fi

"$python" "$here/digests.py" pyengine/ops/_core*.so > "$build/here.txt"
qemu-aarch64-static -L "$root" "$root/usr/bin/$version" -B "$here/digests.py" "$build"/_core*.so > "$build/there.txt"
diff "$build/here.txt" "$build/there.txt"
echo "aarch64: $(wc -l < "$build/there.txt") results with the same bits as on this machine"
