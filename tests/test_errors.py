"""How a job ends: which errors are one sentence, and that no rank is left waiting for another."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import cli_env, hpc_ctr, mpirun

from hpc_ctr.errors import HpcCtrError, UsageError, one_sentence


@pytest.mark.parametrize("number, remedy", [(errno.ENOSPC, "larger disk"), (errno.EROFS, "writable"),
                                            (errno.ENOTDIR, "name a path"), (errno.ENAMETOOLONG, "name a path")])
def test_what_the_machine_refuses_is_one_sentence(number, remedy):
    told = one_sentence(OSError(number, os.strerror(number), "/disk/run"))
    assert type(told) is HpcCtrError and "/disk/run: " in str(told) and remedy in str(told)
    assert os.strerror(number) in str(one_sentence(OSError(number, "without a name")))


def test_memory_is_one_sentence_and_mistakes_are_not():
    assert "memory" in str(one_sentence(MemoryError()))
    assert "memory" in str(one_sentence(RuntimeError("DefaultCPUAllocator: can't allocate memory: 468 bytes\n")))
    usage = UsageError("x: no")
    assert one_sentence(usage) is usage
    for mistake in (ValueError("x"), KeyError("x"), RuntimeError("x"), OSError("no number")):
        assert one_sentence(mistake) is None


RANK_ONE_FAILS = """
import sys
from hpc_ctr.comm import session
session._PATIENCE = 1.0

def main():
    comm = session.start().comm
    if comm.rank == 1:
        {what}
    comm.recv(source=1)
    return 0

session.run_and_exit(main)
"""


@pytest.mark.parametrize("what, code, told", [("sys.exit(0)", 1, "rank 1 left the job with sys.exit(0)"),
                                              ("open('/dev/null/x')", 1, "error on rank 1: /dev/null/x: ")])
def test_a_rank_that_ends_alone_ends_the_others(what, code, told):
    line = [mpirun(), "-n", "2", sys.executable, "-c", RANK_ONE_FAILS.format(what=what)]
    done = subprocess.run(line, env=cli_env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code and told in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_was_removed(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m hpc_ctr.cli.main train job.yaml"
    done = subprocess.run(["sh", "-c", command], env=cli_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "current folder" in done.stderr and "Traceback" not in done.stderr


def test_prepare_under_mpirun_is_the_work_of_one_process(tmp_path):
    done = hpc_ctr("prepare", "synthetic", "--rows", 10, "--test-rows", 0, "--out", tmp_path / "data", ranks=2)
    assert done.returncode == 0 and done.stdout.count("train on it") == 1, done.stderr
