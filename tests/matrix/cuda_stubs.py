"""Let a CUDA build of torch load without CUDA's libraries: python cuda_stubs.py SITE_PACKAGES/torch/lib

Every CUDA library that torch's libraries need is replaced by an empty one. All empty libraries need one more
library, whose functions report that there is no device. Only for tests on a host without accelerators.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = "libcudastub.so"
LIBRARY = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvJit|nvTools|nvtx)")
FUNCTION = re.compile(r"(cu[A-Zbdfprs]|nccl|nvshmem|nvrtc|__cuda|nvtx|_Z\w*nvshmem)")
OF_THE_SYSTEM = ("GLIBC", "GCC_", "CXXABI", "GOMP", "OMP_")
NO_DEVICE = 100  # cudaErrorNoDevice


def needed(library: Path) -> list[str]:
    """Return the names of the libraries that a library needs."""
    return re.findall(r"NEEDED.*\[(.*?)\]", _run("readelf", "-dW", str(library)))


def symbols(library: Path) -> tuple[set[str], set[str]]:
    """Return the functions that a library needs from other libraries, and those that it defines."""
    asked, defined = set(), set()
    for line in _run("readelf", "--dyn-syms", "-W", str(library)).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":"):
            continue
        name, _, version = fields[7].partition("@")
        if fields[6] != "UND":
            defined.add(name)
        elif (
            fields[4] != "WEAK" and not version.lstrip("@").startswith(OF_THE_SYSTEM) and FUNCTION.match(name)
        ):
            asked.add(name)
    return asked, defined


def stub(name: str) -> str:
    """Return the C source of a function that reports that there is no device, as its API would."""
    if re.search(r"(GetErrorString|GetErrorName|StatusString|StatusName)$", name):
        return f'const char *{name}(void) {{ return "no device: a stub"; }}'
    if name.startswith(("__cudaRegister", "__cudaInit")):
        return f"void *{name}(void) {{ static void *handle[4]; return handle; }}"
    if name.startswith("__cudaUnregister"):
        return f"void {name}(void) {{}}"
    return f"int {name}(void) {{ return {NO_DEVICE}; }}"


def main(folder: Path) -> None:
    """Write the stubs into the folder of torch's libraries, where the search path finds them."""
    libraries = [path for path in folder.glob("*.so*") if path.is_file()]
    own = {path.name for path in libraries}
    missing = {name for path in libraries for name in needed(path)} - own - {"libcuda.so.1"}
    missing = sorted(filter(LIBRARY.match, missing))
    asked, defined = (set().union(*sets) for sets in zip(*map(symbols, libraries), strict=True))
    functions = sorted(asked - defined)
    # The functions are in a library with its own name: ld.so refuses an unversioned definition in a file for
    # which another library requires a version.
    _compile(folder / STUB, "\n".join(map(stub, functions)))
    for name in missing:
        _compile(folder / name, "", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", str(folder / STUB))
    print(f"{len(missing)} libraries of {len(functions)} stubs")


def _compile(library: Path, source: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "stub.c"
        code.write_text(f"{source}\nstatic int nothing;\n")
        shared = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}"]
        _run(*shared, "-o", str(library), str(code), *options)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
