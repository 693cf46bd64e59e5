"""The scripts: what they say when something is missing, and how test.sh counts. Nothing is installed here."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"


def bash(command, cwd, environ):
    """Exit code and output of a bash command with a small environment."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "TMPDIR": str(cwd), "PIP_CONFIG_FILE": os.devnull,
           "PIP_RETRIES": "1"} | environ
    done = subprocess.run(["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, timeout=150)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path):
    """A folder with the scripts and pyproject.toml, without an environment."""
    shutil.copytree(SCRIPTS, tmp_path / "clone" / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    return tmp_path / "clone"


def tool(folder, name, text):
    """An executable script in ``folder``; returns the folder's path for PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("path", [*sorted(SCRIPTS.glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_bash_reads_it(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


def pins(name):
    """Package -> version of a pin file."""
    found = {}
    for line in (SCRIPTS / name).read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line:
            package, version = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: --hash=sha256:[0-9a-f]{64})?", line).groups()
            found[package.lower().replace("_", "-")] = version
    return found


def test_everything_is_pinned_and_nothing_is_missing():
    pinned = set(pins("requirements.txt")) | {"torch"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {re.match(r"[\w-]+", each)[0].lower() for each in wanted}
    assert names <= pinned
    assert "horovod" not in names and pins("requirements-horovod.txt") == {"horovod": "0.28.1"}
    assert not set(pins("requirements-bench.txt")) & pinned


def test_console_script():
    from hpc_ctr.cli.main import main

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"hpc-ctr": "hpc_ctr.cli.main:main"}
    assert callable(main)


# ---------------------------------------------------------------- setup.sh


def fails(clone, environ, arguments=""):
    """The sentence with which setup.sh ends; no environment that looks finished may be left."""
    code, out = bash(f"bash scripts/setup.sh {arguments}", clone, environ)
    assert code == 1, out
    assert not (clone / ".venv" / "hpc_ctr.stamp").exists()
    sentences = [line for line in out.splitlines() if line.startswith("setup: ")]
    assert len(sentences) == 1, out
    return sentences[0]


def test_python_that_is_too_old(clone, tmp_path):
    answer = "#!/bin/sh\ncat >/dev/null\necho other 3.9.2\n"
    path = tool(tmp_path / "old", "python3", answer)
    said = fails(clone, {"HPC_CTR_PYTHON": f"{path}/python3"})
    assert "Python 3.11 or 3.12 is needed" in said and "3.9.2" in said and "HPC_CTR_PYTHON" in said


def test_python_shim_that_does_not_run(clone, tmp_path):
    path = tool(tmp_path / "shims", "python3.12", "#!/bin/sh\necho 'no such version' >&2\nexit 127\n")
    assert "does not run" in fails(clone, {"HPC_CTR_PYTHON": f"{path}/python3.12"})


def test_python_without_headers(clone, tmp_path):
    path = tool(tmp_path / "bare", "python3", "#!/bin/sh\ncat >/dev/null\necho nohead 3.11.2\n")
    assert "python3.11-dev" in fails(clone, {"HPC_CTR_PYTHON": f"{path}/python3"})


def test_no_compiler(clone):
    said = fails(clone, {"CXX": "/nowhere/g++", "HPC_CTR_PYTHON": sys.executable})
    assert "no C++ compiler" in said and "apt-get install g++" in said


def test_no_compiler_on_the_path(clone, tmp_path):
    """A machine with the usual tools and no compiler at all."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in os.listdir("/usr/bin"):
        if not re.search(r"(cc|\+\+|clang|cpp)(-[\d.]+)?$", name):
            (tools / name).symlink_to(Path("/usr/bin") / name)
    said = fails(clone, {"PATH": str(tools), "HPC_CTR_PYTHON": sys.executable})
    assert "no C++ compiler" in said and "CXX" in said and "HPC_CTR_HOROVOD=0" in said


def test_compiler_that_is_too_old(clone, tmp_path):
    path = tool(tmp_path / "old", "g++", "#!/bin/sh\necho \"error: unrecognized option '-std=gnu++20'\" >&2\nexit 1\n")
    said = fails(clone, {"CXX": f"{path}/g++", "HPC_CTR_PYTHON": sys.executable})
    assert "does not compile C++20" in said and "unrecognized option" in said


def test_disk_full(clone, tmp_path):
    path = tool(tmp_path / "full", "df", "#!/bin/sh\necho head\necho 'disk 9 8 1000000 99% /'\n")
    said = fails(clone, {"PATH": f"{path}:/usr/bin:/bin", "HPC_CTR_PYTHON": sys.executable, "HPC_CTR_HOROVOD": "0"})
    assert "disk full" in said and "3 GB" in said and "1 GB free" in said


@pytest.mark.parametrize("environment", ["older pins", "the same"])
def test_an_environment_that_is_there_is_brought_up_to_date(environment, clone, tmp_path):
    """Nothing is made anew: what is missing is installed into it. Its Python here finds everything well."""
    path = tool(tmp_path / "bin", "python", "#!/bin/sh\ncat >/dev/null 2>&1 </dev/null\necho $* >>\"$CALLS\"\nexit 0\n")
    env = clone / ".venv"
    shutil.copytree(path, env / "bin")
    (env / "hpc_ctr.stamp").write_text("of older pins\n")
    environ = {"HPC_CTR_PYTHON": "", "HPC_CTR_HOROVOD": "0", "CALLS": str(tmp_path / "calls")}
    calls = []
    for arguments in [""] * (environment == "the same") + ["--bench"]:
        (tmp_path / "calls").write_text("")
        code, out = bash(f"bash scripts/setup.sh {arguments}", clone, environ)
        calls = (tmp_path / "calls").read_text()
        assert code == 0 and out.splitlines()[-1].endswith(".venv is ready"), out
    assert "requirements-bench.txt" in calls and "-m venv" not in calls
    assert ("--editable" in calls) == (environment == "older pins")
    code, out = bash("bash scripts/setup.sh --bench", clone, environ)
    assert code == 0 and "installing" not in out


def test_no_network(clone):
    environ = {"HPC_CTR_PYTHON": sys.executable, "HPC_CTR_HOROVOD": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    said = fails(clone, environ)
    assert "no network" in said and "PIP_INDEX_URL" in said
    assert (clone / ".venv" / "hpc_ctr.making").exists()  # so that the next call makes it anew


def test_folder_that_is_no_environment_is_kept(clone):
    (clone / ".venv").mkdir()
    (clone / ".venv" / "notes.txt").write_text("mine")
    said = fails(clone, {"HPC_CTR_PYTHON": sys.executable, "HPC_CTR_HOROVOD": "0"})
    assert "is no virtual environment" in said and (clone / ".venv" / "notes.txt").exists()


def test_wrong_arguments(clone):
    assert "--bench" in fails(clone, {}, "--benhc")
    assert "HPC_CTR_MPI=mpich" in fails(clone, {"HPC_CTR_MPI": "mpich"})
    if not shutil.which("mpicxx", path="/usr/bin:/bin"):
        assert "no mpirun" in fails(clone, {"HPC_CTR_MPI": "system", "PATH": "/usr/bin:/bin"})


# ---------------------------------------------------------------- mpienv.sh


def test_environment_of_mpirun(tmp_path):
    show = f". {SCRIPTS}/mpienv.sh; env"
    code, out = bash(show, tmp_path, {"OMP_NUM_THREADS": "3"})
    env = dict(line.partition("=")[::2] for line in out.splitlines())
    assert code == 0
    assert env["OMP_NUM_THREADS"] == "3" and env["OMP_WAIT_POLICY"] == "passive"
    assert env["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert env["HPC_CTR_ROOT"] == str(ROOT) and env["PATH"].startswith(f"{ROOT}/.venv/bin:")
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in env) == (os.getuid() == 0)


def test_conda_environment_with_an_mpi_is_used(tmp_path):
    for name in ("mpicxx", "python"):
        tool(tmp_path / "bin", name, "#!/bin/sh\n")
    show = f". {SCRIPTS}/mpienv.sh; echo $HPC_CTR_ENV"
    conda = {"CONDA_PREFIX": str(tmp_path), "CONDA_DEFAULT_ENV": "hpc_ctr"}
    assert bash(show, tmp_path, conda)[1].strip() == str(tmp_path)
    assert bash(show, tmp_path, conda | {"CONDA_DEFAULT_ENV": "base"})[1].strip() == f"{ROOT}/.venv"


# ---------------------------------------------------------------- test_part.py


@pytest.fixture
def part():
    spec = importlib.util.spec_from_file_location("test_part", SCRIPTS / "test_part.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_marks_are_narrowed_not_replaced(part):
    assert part.with_marks("parallel[1]", ["-k", "store"]) == ["-m", "(parallel[1])", "-k", "store"]
    assert part.with_marks("a", ["-m", "slow or gpu", "-x"]) == ["-m", "(a) and (slow or gpu)", "-x"]
    assert part.with_marks("a", ["-mslow"]) == ["-m", "(a) and (slow)"]


def test_worst_outcome_over_ranks_counts(part, tmp_path, capsys):
    (tmp_path / "two.0.outcomes").write_text("passed\ta\npassed\tb\nskipped\tc\ncomplete\t\n")
    (tmp_path / "two.1.outcomes").write_text("passed\ta\nfailed\tb\nskipped\tc\ncomplete\t\n")
    (tmp_path / "two.1.log").write_text("assert 1 == 2\n")
    assert not part.close(tmp_path, "two", 2, 0)
    assert not part.total(tmp_path)
    out = capsys.readouterr().out
    assert "assert 1 == 2" in out and out.splitlines()[-1] == "1 passed, 1 failed, 1 skipped"


def test_rank_that_dies_fails_the_test_it_was_in(part, tmp_path, capsys):
    (tmp_path / "two.0.outcomes").write_text("started\ta\npassed\ta\nended\ta\nstarted\tb\n")
    assert not part.close(tmp_path, "two", 2, 137)  # rank 1 has not even begun
    assert not part.total(tmp_path)
    out = capsys.readouterr().out
    assert "rank 0 ended in b" in out and out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_exit_code_without_a_failed_test_fails(part, tmp_path, capsys):
    (tmp_path / "one.0.outcomes").write_text("passed\ta\ncomplete\t\n")
    assert not part.close(tmp_path, "one", 1, 3)
    assert not part.total(tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("selected, code, closing", [
    ("good", 0, "1 passed, 0 failed, 0 skipped"), ("bad", 1, "0 passed, 1 failed, 0 skipped"),
    ("nothing", 1, "0 passed, 0 failed, 0 skipped")])
def test_a_part_from_end_to_end(tmp_path, selected, code, closing):
    (tmp_path / "test_it.py").write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert 0\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMIX"))}
    call = [sys.executable, str(SCRIPTS / "test_part.py")]
    where = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 120}
    ran = subprocess.run([*call, str(tmp_path), "serial", "parallel[1]", "-k", selected, "test_it.py"], **where)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    subprocess.run([*call, "--close", str(tmp_path), "serial", "1", str(ran.returncode)], **where)
    done = subprocess.run([*call, "--total", str(tmp_path)], **where)
    assert done.returncode == code and done.stdout.splitlines()[-1] == closing
