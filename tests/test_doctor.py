"""hpc-ctr doctor, as people run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

JOB = """
run_dir: {run}
data:
  format: recbole
  files: [{folder}/a.inter]
  schema: {{label: "rating >= 4", categorical: [user_id, item_id]}}
  split: {{by: none}}
  batch_size: 8
model: {{name: deepfm, hidden: [4]}}
embedding: {{dim: 4}}
storage: {{host_budget: 64MiB}}
"""


def doctor(*arguments, **environ):
    """Exit code and output of a doctor of its own, outside of any MPI job that this test may run in."""
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("OMPI_COMM", "PMIX", "SLURM", "PRTE_L"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ
    done = subprocess.run([sys.executable, "-m", "hpc_ctr.cli.main", "doctor", *map(str, arguments)], env=env,
                          capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def job(tmp_path):
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\n1\t2\t5\n")
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(run=tmp_path / "run", folder=tmp_path))
    return path


def test_this_machine(tmp_path):
    code, out = doctor()
    assert code == 0, out
    for word in ("MPI_THREAD_MULTIPLE", "Horovod:", "torch:", "rank 0 on", "NUMA node", "memory of", "disk under",
                 "nothing wrong found"):
        assert word in out


def test_plan_of_a_job(job, tmp_path):
    code, out = doctor(job)
    assert code == 0, out
    assert "64.00 MiB" in out and str(tmp_path / "run") in out
    assert not (tmp_path / "run").exists()  # nothing is made


def test_data_that_does_not_fit_the_job(job):
    code, out = doctor(job, "--data.format", "criteo", "--data.schema", "null")
    assert code == 1
    assert "WRONG: data.files: a.inter has 3 columns" in out and "data.schema" in out


def test_more_memory_than_there_is(job):
    code, out = doctor(job, "--storage.host_budget", "900TiB")
    assert code == 1
    assert "WRONG: storage.host_budget" in out and "lower it" in out


def test_store_that_cannot_be_written(job, tmp_path):
    (tmp_path / "file").write_text("x")
    code, out = doctor(job, "--storage.dir", tmp_path / "file")
    assert code == 1
    assert "WRONG: storage.dir" in out and "not writable" in out


def test_more_threads_than_cpus():
    code, out = doctor(OMP_NUM_THREADS="4000")
    assert code == 1
    assert "WRONG: 4000 threads" in out and "--cpus-per-task" in out


def test_slurm_step_of_singletons():
    code, out = doctor(SLURM_STEP_ID="0", SLURM_NTASKS="2", SLURM_PROCID="0")
    assert code == 1
    assert "WRONG: MPI sees 1 rank but SLURM_NTASKS is 2" in out and "srun --mpi=pmix" in out


def test_wrong_job_file(job):
    code, out = doctor(job, "--storage.host_budgt", "1GiB")
    assert code == 2
    assert "host_budget" in out


@pytest.mark.parallel(nprocs=2)
def test_ranks_see_each_other(tmp_path, capsys):
    import argparse

    from mpi4py import MPI

    from hpc_ctr.cli import doctor as command

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor"])
    args.overrides = {}
    code = args.run(args)
    out = capsys.readouterr().out
    assert code == 0, out
    if MPI.COMM_WORLD.rank == 0:
        assert "ranks: 2" in out and "rank 1 on" in out
    else:
        assert out == ""
