"""doctor and the facts it stands on."""

import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from hpc_ctr.cli.doctor import rank_problems
from hpc_ctr.cluster.host import Host, disk_of, format_cpu_list, numa_cpus, parse_cpu_list, this_host
from hpc_ctr.comm.session import check_launch
from hpc_ctr.errors import UsageError

JOB = """
data: {{format: criteo, files: [{data}]}}
storage: {{host_budget: {budget}}}
run_dir: {run}
"""


def doctor(tmp_path: Path, budget: str = "64MiB", *args: str) -> subprocess.CompletedProcess:
    data = tmp_path / "train.tsv"
    data.write_text("\t".join(["1"] + ["3"] * 13 + ["0000000a"] * 26) + "\n")
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(data=data, budget=budget, run=tmp_path / "run"))
    return subprocess.run([sys.executable, "-m", "hpc_ctr.cli.main", "doctor", str(job), *args], capture_output=True,
                          text=True)


def test_cpu_lists_both_ways():
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert format_cpu_list((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"
    assert parse_cpu_list("\n") == set() and format_cpu_list(()) == ""


def test_numa_nodes_from_sysfs(tmp_path):
    for node, cpus in ((0, "0-1"), (1, "2-3"), (10, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    assert numa_cpus(tmp_path) == {0: {0, 1}, 1: {2, 3}, 10: set()}
    assert set(numa_cpus(tmp_path / "none")) == {0}


def test_disk_of_a_path_that_does_not_exist_yet(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"rootdev / ext4 rw 0 0\nssd {tmp_path} xfs rw 0 0\nother {tmp_path}x nfs rw 0 0\n")
    disk = disk_of(tmp_path / "a" / "b", str(mounts))
    assert (disk.mount, disk.kind) == (str(tmp_path), "xfs")
    assert 0 < disk.free <= disk.total


def test_too_many_threads_for_the_mask():
    host = Host("n0", (0, 1), (0,), 4, 1, 1)
    assert "rank 0" in rank_problems([host], 1)[0] and "OMP_NUM_THREADS" in rank_problems([host], 1)[0]
    assert rank_problems([Host("n0", (0, 1), (0,), 2, 1, 1)], 2) == []
    assert len(rank_problems([Host("n0", (0, 1), (0,), 1, 1, 1)], 3)) == 1


def test_singletons_under_slurm_are_refused():
    step = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    with pytest.raises(UsageError, match="--mpi=pmix"):
        check_launch(1, step)
    check_launch(4, step)
    check_launch(1, {})
    check_launch(1, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"})  # a batch script that starts mpirun itself
    check_launch(1, step | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})


def test_doctor_shows_software_ranks_and_plan(tmp_path):
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("MPI: Open MPI", "MPI_THREAD_MULTIPLE", "Horovod:", "torch: 2.", "rank 0:", "NUMA",
                 "host budget of a rank: 64.00 MiB", "storage.dir:", "all is well"):
        assert part in done.stdout, part
    assert not (tmp_path / "run").exists()


def test_doctor_finds_a_budget_beyond_memory(tmp_path):
    done = doctor(tmp_path, "900TB")
    assert done.returncode == 1
    assert "problem: storage.host_budget" in done.stdout and "lower it" in done.stdout


def test_doctor_usage_error(tmp_path):
    done = doctor(tmp_path, "64MiB", "--merge.q", "3")
    assert done.returncode == 2 and "merge.q" in done.stderr


@pytest.mark.parallel(nprocs=2)
def test_every_rank_knows_its_place():
    hosts = MPI.COMM_WORLD.allgather(this_host())
    assert len(hosts) == 2 and all(h.cpus and h.numa_nodes for h in hosts)
