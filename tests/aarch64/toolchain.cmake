# The core for aarch64, by Debian's cross compiler. Python's headers are those of the interpreter that builds: both
# machines are little-endian with 64-bit pointers.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
