"""Facts about the machine, from made-up kernel files and from this one."""

import os
from pathlib import Path

import pytest

from hpc_ctr.cluster import cpus, disks, launch
from hpc_ctr.cluster.memory import memory


@pytest.mark.parametrize("text, expected", [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("5", [5]), ("\n", []),
                                            ("7,1-2", [1, 2, 7])])
def test_cpu_lists(text, expected):
    assert cpus.parse_cpu_list(text) == expected
    assert cpus.parse_cpu_list(cpus.format_cpu_list(expected)) == expected


def test_format_cpu_list():
    assert cpus.format_cpu_list([8, 0, 1, 2, 2]) == "0-2,8"
    assert cpus.format_cpu_list([]) == ""


def test_numa_nodes(tmp_path):
    for node, text in ((0, "0-3"), (1, "4-7"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text + "\n")
    nodes = cpus.numa_nodes(tmp_path)
    assert nodes == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}  # a node of memory alone is not one to run on
    assert cpus.nodes_of([2, 3], nodes) == [0]
    assert cpus.nodes_of([3, 4], nodes) == [0, 1]


def test_numa_of_a_kernel_without():
    assert list(cpus.numa_nodes(Path("/nowhere"))) == [0]


def test_affinity_is_on_known_nodes():
    mine = cpus.affinity()
    assert mine and cpus.nodes_of(mine, cpus.numa_nodes())


def test_thread_count():
    assert cpus.thread_count({"OMP_NUM_THREADS": "3"}) == 3
    assert cpus.thread_count({"OMP_NUM_THREADS": "4,2"}) == 4
    assert cpus.thread_count({}) == len(cpus.affinity())


MOUNTS = r"""22 27 0:21 / / rw - ext4 /dev/sda1 rw
23 22 0:22 / /scratch rw,relatime shared:3 - xfs /dev/nvme0n1 rw
24 22 0:23 / /scratch/net rw - nfs4 server:/home rw
25 22 0:24 / /my\040disk rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize("path, expected", [
    ("/etc/x", ("/", "ext4", "/dev/sda1")), ("/scratch/store/0", ("/scratch", "xfs", "/dev/nvme0n1")),
    ("/scratch/net/a", ("/scratch/net", "nfs4", "server:/home")), ("/scratch2", ("/", "ext4", "/dev/sda1")),
    ("/my disk/a", ("/my disk", "tmpfs", "tmpfs"))])
def test_mount_of(path, expected):
    assert disks.mount_of(path, disks.parse_mounts(MOUNTS)) == expected


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    disk = disks.disk_of(tmp_path / "a" / "b")
    assert disk.writable and 0 < disk.free <= disk.total
    assert disk.filesystem != "unknown" and str(tmp_path).startswith(disk.mount)
    assert not (tmp_path / "a").exists()


def test_disk_below_a_file_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("x")
    assert not disks.disk_of(tmp_path / "file" / "store").writable


def test_kinds_of_disk():
    assert disks.Disk("/a", "/a", "nfs4", "s:/a", 1, 1, True).is_network
    assert disks.Disk("/a", "/a", "tmpfs", "tmpfs", 1, 1, True).is_memory


GIB = 2**30


def write_proc(root: Path, cgroup: str) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    return root / "proc"


def test_memory_without_a_limit(tmp_path):
    found = memory(write_proc(tmp_path, "0::/\n"), tmp_path / "none")
    assert (found.total, found.available, found.limit) == (16 * GIB, 8 * GIB, 0)


def test_memory_in_a_control_group(tmp_path):
    proc = write_proc(tmp_path, "0::/job/step\n")
    for folder, limit, used in (("job", "4294967296", "3221225472"), ("job/step", "max", "1073741824")):
        where = tmp_path / "groups" / folder
        where.mkdir(parents=True, exist_ok=True)
        (where / "memory.max").write_text(limit + "\n")
        (where / "memory.current").write_text(used + "\n")
        (where / "memory.stat").write_text("anon 5\ninactive_file 536870912\n")
    found = memory(proc, tmp_path / "groups")
    assert (found.limit, found.available) == (4 * GIB, GIB + GIB // 2)


def test_memory_in_a_control_group_of_the_first_kind(tmp_path):
    proc = write_proc(tmp_path, "9:name=systemd:/\n4:memory:/job\n")
    where = tmp_path / "groups" / "memory" / "job"
    where.mkdir(parents=True)
    (where / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (where / "memory.usage_in_bytes").write_text(str(GIB))
    assert memory(proc, tmp_path / "groups").available == GIB


def test_memory_of_this_machine():
    found = memory()
    assert 0 < found.available <= found.total


@pytest.mark.parametrize("environ, expected", [
    ({}, None),
    ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # the batch script
    ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, ("SLURM_NTASKS", 4)),
    ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_ID": "0"}, ("SLURM_STEP_NUM_TASKS", 3)),
    ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "OMPI_COMM_WORLD_SIZE": "8"}, ("OMPI_COMM_WORLD_SIZE", 8)),
    ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_HET_SIZE": "2"}, None),
    ({"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, ("PMI_SIZE", 3)),
])
def test_launched_size(environ, expected):
    assert launch.launched_size(environ) == expected


def test_size_problem():
    step = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    assert launch.size_problem(4, step) is None
    assert "srun --mpi=pmix" in launch.size_problem(1, step)
    assert "mpirun of the MPI library" in launch.size_problem(1, {"OMPI_COMM_WORLD_SIZE": "2"})


def test_mpi_libraries():
    maps = ("7f00-7f01 r-xp 00000000 fe:00 12  /opt/a/lib/libmpi.so.40.40.1\n"
            "7f01-7f02 r--p 00000000 fe:00 12  /opt/a/lib/libmpi.so.40.40.1\n"
            "7f02-7f03 r-xp 00000000 fe:00 13  /usr/lib/libmpich.so.12\n"
            "7f03-7f04 rw-p 00000000 00:00 0\n"
            "7f04-7f05 r-xp 00000000 fe:00 14  /opt/a/lib/libmpi_usempif08.so.40\n")
    assert launch.mpi_libraries(maps) == ["/opt/a/lib/libmpi.so.40.40.1", "/usr/lib/libmpich.so.12"]
    assert isinstance(launch.mpi_libraries(), list)


@pytest.mark.parallel(nprocs=2)
def test_launcher_and_mpi_agree():
    from mpi4py import MPI

    assert launch.size_problem(MPI.COMM_WORLD.size, os.environ) is None
