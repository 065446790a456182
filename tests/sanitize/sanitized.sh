#!/bin/sh
# Run a command with AddressSanitizer and UndefinedBehaviorSanitizer; the first error ends it.
# Python leaks by design, and allocates small objects from pools that the sanitizer cannot observe.
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
export LD_PRELOAD="${FIRST_PRELOAD:+$FIRST_PRELOAD }$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1
export PYTHONMALLOC=malloc PYTHONPATH="$ROOT:$ROOT/tests/sanitize${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"
