#!/usr/bin/env bash
# All test files side by side, one process each: for a machine with many cores and no pytest-xdist.
# Usage: .ci/device_tests.sh OUT [pytest arguments]; OUT gets a log per file and a summary.
set -u
out=$1; shift
export PYTHONPATH=src OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
find tests -name 'test_*.py' | sort > "$out/files"
one() {
    log="$2/$(echo "$1" | tr / _).log"
    timeout 500 python -m pytest -q -p no:cacheprovider -p no:xdist "$1" "${@:3}" > "$log" 2>&1
    tail -n 1 "$log" | sed "s|^|$1: |"
}
export -f one
xargs -a "$out/files" -P "${JOBS:-15}" -I{} bash -c 'one "$@"' _ {} "$out" "$@" | tee "$out/summary"
grep -h "^FAILED\|^ERROR" "$out"/*.log | sort > "$out/failed" || true
wc -l < "$out/failed"
