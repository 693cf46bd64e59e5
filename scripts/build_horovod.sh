#!/usr/bin/env bash
# Builds the Horovod wheel for a Python environment that holds PyTorch, cmake and ninja, and puts it into a folder.
#
#   bash scripts/build_horovod.sh ENV FOLDER     ENV: a virtual or conda environment; FOLDER must exist
#
# mpicxx is the one in ENV/bin, else the first on PATH. Settings from the environment: CXX (the compiler),
# HOROVOD_GPU_OPERATIONS=NCCL (with nvcc on PATH). The wheel appears in FOLDER only when it is complete.
set -euo pipefail

env=$(cd "$1" && pwd -P) out=$2 here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/hpc_ctr-horovod.XXXXXX")
trap 'rm -rf "$work"' EXIT
cxx=$(command -v "${CXX:-c++}")
mkdir "$work/bin" "$work/wheel"

# PyTorch's headers want C++20 and Horovod's CMake says 14: the last -std wins. nvcc's own passes must keep theirs, so
# only Horovod's sources get it. Without debug symbols, with little optimization where Horovod only binds to Python, and
# with a dozen sources a compilation, the build takes a fifth of the time and the library 1/20 of the space. The wheel
# serves other environments than the one it was built in, whose MPI library it must not load: search paths into that one
# become paths from the library's own place, ENV/lib/python3.x/site-packages/horovod/torch.
cat >"$work/bin/cxx" <<WRAPPER
#!/usr/bin/env bash
env=$(printf %q "$env") work=$(printf %q "$work") cxx=$(printf %q "$cxx")
WRAPPER
cat >>"$work/bin/cxx" <<'WRAPPER'
args=() last=(-g0 -w)
for arg in "$@"; do
    case $arg in
        -Wl,-rpath,*)
            kept=
            IFS=: read -ra paths <<<"${arg#-Wl,-rpath,}"
            for path in "${paths[@]}"; do
                case $path/ in "$env"/*|"$work"/*) ;; *) kept=$kept:$path ;; esac
            done
            arg='-Wl,-rpath,$ORIGIN/../../../..:$ORIGIN/../../torch/lib:$ORIGIN/../../nvidia/nccl/lib'$kept
            ;;
        */horovod/torch/*.cc) last+=(-std=gnu++20 -O1) ;;
        *.cc) last+=(-std=gnu++20) ;;
        */Unity/unity_*.cxx)
            last+=(-std=gnu++20)
            if grep -q '/horovod/torch/' "$arg"; then last+=(-O1); fi
            ;;
    esac
    args+=("$arg")
done
exec "$cxx" "${args[@]}" "${last[@]}"
WRAPPER
# Horovod hands options for make to whatever builds: eight jobs whatever the memory, and VERBOSE=1.
jobs=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
room=$(awk '/^MemAvailable:/ {print int($2 / 1800000)}' /proc/meminfo)
jobs=$((room < 1 ? 1 : room < jobs ? room : jobs))
cat >"$work/bin/ninja" <<WRAPPER
#!/usr/bin/env bash
args=()
for arg in "\$@"; do
    case \$arg in -j*|VERBOSE=*) ;; *) args+=("\$arg") ;; esac
done
exec "$env/bin/ninja" -j$jobs "\${args[@]}"
WRAPPER
# With NCCL there are more sources, which nobody has tried to compile together.
together=
if [ -z "${HOROVOD_GPU_OPERATIONS:-}" ]; then together='-DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=12'; fi
cat >"$work/bin/cmake" <<WRAPPER
#!/usr/bin/env bash
case \$1 in
    --*) exec "$env/bin/cmake" "\$@" ;;
    *) exec "$env/bin/cmake" "\$@" $together ;;
esac
WRAPPER
chmod +x "$work"/bin/*

export PATH="$work/bin:$env/bin:$PATH" CXX="$work/bin/cxx" CMAKE_GENERATOR=Ninja HOROVOD_CMAKE="$work/bin/cmake"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1
export HOROVOD_WITHOUT_MXNET=1
unset MAKEFLAGS CMAKE_BUILD_PARALLEL_LEVEL
if [ "${HOROVOD_GPU_OPERATIONS:-}" = NCCL ]; then
    # NCCL's library and headers came with PyTorch, without the plain name that a linker looks for.
    nccl=$("$env/bin/python" -c 'import importlib.util as u, os; s = u.find_spec("nvidia.nccl")
print(next((p for p in (s.submodule_search_locations if s else []) if os.path.exists(p + "/include/nccl.h")), ""))')
    if [ -n "$nccl" ]; then
        mkdir "$work/nccl"
        ln -s "$nccl"/lib/libnccl.so.* "$work/nccl/libnccl.so"
        export HOROVOD_NCCL_INCLUDE="$nccl/include" HOROVOD_NCCL_LIB="$work/nccl" HOROVOD_NCCL_LINK=SHARED
    fi
fi
# pip would keep the wheel in its own cache under a name that knows nothing of PyTorch's version.
"$env/bin/python" -m pip wheel --verbose --no-cache-dir --no-deps --no-build-isolation --no-binary horovod \
    --wheel-dir "$work/wheel" -r "$here/requirements-horovod.txt"
wheel=$(basename "$work"/wheel/horovod-*.whl)
cp "$work/wheel/$wheel" "$out/.$wheel.$$"
mv "$out/.$wheel.$$" "$out/$wheel"
