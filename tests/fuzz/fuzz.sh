#!/bin/sh
# Run fuzz.py under the sanitizers; `make fuzz` sets PYTHON, PYENGINE_CORE and FUZZ_TARGET.
export FIRST_PRELOAD="$(dirname "$PYENGINE_CORE")/libcoverage.so"
exec "$(dirname "$0")/../sanitize/sanitized.sh" "$PYTHON" "$(dirname "$0")/fuzz.py" "$@"
