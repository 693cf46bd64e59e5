#!/usr/bin/env bash
# Sets up .venv if need be and runs all tests: the serial ones, those on 2, 3 and 4 MPI ranks, those that kill ranks.
#
#   bash scripts/test.sh                      everything
#   bash scripts/test.sh -k store             arguments go to pytest, in every part
#   HPC_CTR_TEST_RANKS="2" bash scripts/test.sh tests/test_x.py
#
# The last line is 'N passed, N failed, N skipped', summed over the parts; a test that runs on several ranks counts once
# and has failed when it failed on any. Settings from the environment: HPC_CTR_TEST_TIMEOUT (seconds a test may take, 180).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
bash "$here/setup.sh"
. "$here/mpienv.sh"
out=$(mktemp -d "${TMPDIR:-/tmp}/hpc_ctr-test.XXXXXX")
trap 'rm -rf "$out"' EXIT
export HPC_CTR_TEST_OUT=$out
python=$HPC_CTR_ENV/bin/python
# a rank that hangs outside of a test must not hold up everything
part_limit=2400

part() {  # 1: name; 2: ranks; 3: marker expression; then pytest's arguments
    local name=$1 ranks=$2 marks=$3 rc=0 began=$SECONDS launch=()
    shift 3
    printf '\n[%4d s] tests: %s\n' "$SECONDS" "$name"
    if [ "$ranks" != 1 ]; then launch=(mpirun -n "$ranks" --bind-to none); fi
    timeout --kill-after=20 "$part_limit" "${launch[@]}" "$python" "$here/test_part.py" "$out" "$name" "$marks" "$@" </dev/null || rc=$?
    "$python" "$here/test_part.py" --close "$out" "$name" "$ranks" "$rc" || failed=1
    printf '[%4d s] %s took %d s\n' "$SECONDS" "$name" $((SECONDS - began))
}

failed=0
part serial 1 "parallel[1] and not kills" "$@"
for ranks in ${HPC_CTR_TEST_RANKS:-2 3 4}; do
    part "$ranks-ranks" "$ranks" "parallel[$ranks] and not kills" "$@"
done
part kills 1 "kills" "$@"
echo
"$python" "$here/test_part.py" --total "$out" || failed=1
exit "$failed"
