# Parts of setup.sh: finding tools, running its stages, and saying what to do when something is missing.

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {  # 1: kind of MPI. Prints PATH|VERSION of the first Python that can be used; fails with the remedy
    local name path answer other= nohead= novenv=
    while read -r path; do
        # a shim may be there and not run: only running tells
        answer=$(timeout 30 "$path" - 2>/dev/null <<'PROBE' || true
import importlib.util, os, sys, sysconfig
ok = (3, 11) <= sys.version_info[:2] <= (3, 12) and sys.maxsize > 2**32
venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
head = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
print("other" if not ok else "novenv" if not venv else "nohead" if not head else "good", "%d.%d.%d" % sys.version_info[:3])
PROBE
)
        case $answer in
            good\ *) printf '%s|%s\n' "$path" "${answer#* }"; return 0 ;;
            nohead\ *) nohead=${nohead:-$path|${answer#* }} ;;
            novenv\ *) novenv=${novenv:-$path|${answer#* }} ;;
            other\ *) other="${other:+$other, }$path is ${answer#* }" ;;
            *) if [ -n "${HPC_CTR_PYTHON:-}" ]; then other="$path does not run"; fi ;;
        esac
    done < <(python_candidates "$1")
    local short
    if [ -n "$nohead" ]; then
        if [ "${HPC_CTR_HOROVOD:-1}" = 0 ]; then printf '%s\n' "$nohead"; return 0; fi
        short=$(short_version "${nohead#*|}")
        fail "${nohead%|*} has no headers to build Horovod with: install python$short-dev (apt-get install python$short-dev) or leave Horovod out with HPC_CTR_HOROVOD=0"
    elif [ -n "$novenv" ]; then
        short=$(short_version "${novenv#*|}")
        fail "${novenv%|*} cannot make virtual environments: install python$short-venv (apt-get install python$short-venv python$short-dev)"
    fi
    fail "Python 3.11 or 3.12 is needed${other:+ ($other)}: install one (apt-get install python3.11 python3.11-venv python3.11-dev) or name it with HPC_CTR_PYTHON=/path/to/python3.11"
}

short_version() { printf '%s' "${1%.*}"; }

python_candidates() {  # one path a line
    if [ -n "${HPC_CTR_PYTHON:-}" ]; then
        command -v "$HPC_CTR_PYTHON" || printf '%s\n' "$HPC_CTR_PYTHON"
    elif [ "$1" = conda ]; then
        printf '%s\n' "$CONDA_PREFIX/bin/python"
    else
        local name
        for name in python3 python3.11 python3.12 python; do type -aP "$name" || true; done
        compgen -G "${PYENV_ROOT:-${HOME:-/nowhere}/.pyenv}/versions/3.1[12].*/bin/python3" || true
    fi
}

find_compiler() {  # prints its name and version; it must compile and link a C++20 program
    local name dir rc=0
    dir=$(mktemp -d "${TMPDIR:-/tmp}/hpc_ctr-cxx.XXXXXX") || fail "no file can be made in ${TMPDIR:-/tmp}: free space there, or set TMPDIR"
    name=${CXX:-c++}
    printf '#include <concepts>\n#include <string>\nint main() { std::integral auto n = std::string("ab").size(); return n == 2 ? 0 : 1; }\n' >"$dir/a.cc"
    command -v "$name" >/dev/null || rc=1
    if [ "$rc" = 0 ]; then "$name" -std=gnu++20 -o "$dir/a" "$dir/a.cc" >"$dir/out" 2>&1 || rc=2; fi
    local said
    said=$(grep -m1 -i -E 'error|cannot' "$dir/out" 2>/dev/null || true)
    rm -rf "$dir"
    case $rc in
        0) "$name" --version | head -1 ;;
        1) fail "no C++ compiler ($name) is there to build Horovod with: install one (apt-get install g++), name it with CXX, or leave Horovod out with HPC_CTR_HOROVOD=0" ;;
        *) fail "$name does not compile C++20${said:+ (it says: $said)}: install a newer one (apt-get install g++), name it with CXX, or leave Horovod out with HPC_CTR_HOROVOD=0" ;;
    esac
}

find_cache() {  # prints the folder for what is kept between clones
    local dir=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/hpc_ctr
    if ! mkdir -p "$dir" 2>/dev/null || [ ! -w "$dir" ]; then
        dir=${TMPDIR:-/tmp}/hpc_ctr-cache-$(id -u)
        mkdir -p "$dir" || fail "$dir cannot be made: set XDG_CACHE_HOME to a folder where you may write"
    fi
    printf '%s\n' "$dir"
}

check_space() {  # 1: a path on the disk; 2: GB needed; 3: for what
    local free
    free=$(df -Pk "$1" | awk 'NR == 2 {print int($4 / 1000000)}')
    if [ "${free:-0}" -lt "$2" ]; then
        fail "disk full: $3 needs about $2 GB and the disk of $1 has $free GB free: free space there, or clone to a larger disk"
    fi
}

remove_old() {  # 1: environment; 2: its mark. What is there is unfinished, broken or made with another Python
    if [ ! -e "$1" ]; then return 0; fi
    if [ ! -e "$2" ] && [ ! -e "$1/pyvenv.cfg" ] && [ -n "$(ls -A "$1" 2>/dev/null)" ]; then
        fail "$1 is there and is no virtual environment: move it away and run this again"
    fi
    say "removing $1: it is unfinished, broken or made with another Python"
    rm -rf "$1"
}

try_stage() {  # 1: title; then a command. One line with the seconds it took; its output goes to $log
    local title=$1 began=$SECONDS rc=0
    shift
    printf '[%4d s] %s ' "$SECONDS" "$title"
    (while :; do sleep 10 >/dev/null 2>&1 9>&- 8>&-; printf .; done) 9>&- 8>&- &
    ticker=$!
    ("$@") >"$log" 2>&1 || rc=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    if [ "$rc" = 0 ]; then printf ' %d s\n' $((SECONDS - began)); else printf ' failed\n'; fi
    return "$rc"
}

stage() {  # as try_stage; a failure ends the set-up with a sentence
    try_stage "$@" || explain "$log" "the set-up failed at: $1; the log says why, and running this again starts afresh"
}

explain() {  # 1: log; 2: the sentence where nothing better is known
    local missing
    if grep -q -E 'No space left on device|Errno 28|Disk quota exceeded' "$1"; then
        rm -rf "$env/tmp"
        fail "disk full while writing to $env or $cache: free about 3 GB (9 GB where PyTorch brings CUDA) and run this again"
    # told not to retry, pip says only that the index has nothing
    elif grep -q -E 'NewConnectionError|ConnectTimeout|Read timed out|ReadTimeout|Max retries|Temporary failure in name|Name or service not known|Network is unreachable|ProxyError|Connection refused|ConnectionResetError|SSLError|\(from versions: none\)' "$1"; then
        fail "no network: pip cannot reach its package index (or that has nothing for this Python); check the connection and HTTPS_PROXY, or set PIP_INDEX_URL to a mirror that can be reached, and run this again (log: $1)"
    fi
    missing=$(grep -m1 -o -E 'No matching distribution found for [^ ]+' "$1" || true)
    if [ -n "$missing" ]; then
        fail "pip: $missing; its index has none for this Python and platform: set PIP_INDEX_URL or PIP_FIND_LINKS to a place that has it (log: $1)"
    fi
    fail "$2 (log: $1)"
}
