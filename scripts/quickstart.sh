#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up .venv, fetches MovieLens-100K, trains DeepFM on two ranks.
#
#   bash scripts/quickstart.sh
#
# Settings from the environment: HPC_CTR_RANKS (left out: 2), and those of setup.sh.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
bash "$here/setup.sh"
. "$here/mpienv.sh"

ranks=${HPC_CTR_RANKS:-2}
data=data/ml-100k
run=runs/quickstart
step() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

if [ ! -s "$data/ml-100k.inter" ]; then
    step "fetching MovieLens-100K"
    "$HPC_CTR_ENV/bin/python" -m hpc_ctr.cli.main prepare movielens --out "$data"
fi
step "training DeepFM on $ranks ranks (examples/movielens.yaml)"
mpirun -n "$ranks" --bind-to none "$HPC_CTR_ENV/bin/hpc-ctr" train examples/movielens.yaml --run_dir "$run" --overwrite true
step "done"
"$HPC_CTR_ENV/bin/python" - "$run" <<'SHOW'
import json
import os
import sys

run = sys.argv[1]
with open(os.path.join(run, "summary.json")) as file:
    summary = json.load(file)
print(f"""
test AUC      {summary["test_auc"]:.4f}
test logloss  {summary["test_logloss"]:.4f}
samples/s     {summary["samples_per_s"]:,.0f} on {summary["ranks"]} ranks
run folder    {os.path.abspath(run)}""")
SHOW
