"""hpc-ctr doctor: what the job would run on, what it would take, and what is wrong."""

import argparse
import os
from dataclasses import asdict
from typing import Any

from hpc_ctr.cluster.host import Host, disk_of, existing_parent, format_cpu_list, this_host
from hpc_ctr.units import format_bytes


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser(
        "doctor", help="show MPI, Horovod, torch, ranks, disks, and a job's memory plan; exit 1 where something is wrong",
        epilog="Run it under the same mpirun or srun as the job to see the ranks as the job would.")
    parser.add_argument("job", nargs="?", default="", help="job file: its plan is shown, nothing is allocated")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns 0, or 1 when a problem was found."""
    from hpc_ctr import config as job_file
    from hpc_ctr.comm import session as mpi

    config = job_file.load(args.job, args.overrides) if args.job else None
    session = mpi.start()
    lines, problems = software()
    hosts = session.comm.gather(asdict(this_host()))
    plan, plan_problems = job_plan(config, session) if config else ([], [])
    all_problems = session.comm.gather(plan_problems)
    if session.is_root:
        placed = [Host(**h) for h in hosts]
        lines += describe_ranks(placed)
        problems += rank_problems(placed, config.train.threads if config else 1)
        lines += plan
        for found in all_problems:
            problems += [problem for problem in found if problem not in problems]
        print("\n".join(lines))
        for problem in problems:
            print(f"problem: {problem}")
        print("all is well" if not problems else f"{len(problems)} problem(s)")
    return session.comm.bcast(1 if problems else 0)


def software() -> tuple[list[str], list[str]]:
    """Versions and builds as lines, and what is wrong with them."""
    import torch
    from mpi4py import MPI

    from hpc_ctr.comm.allreduce import horovod_status

    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED",
              MPI.THREAD_MULTIPLE: "MULTIPLE"}
    library = MPI.Get_library_version().replace("\x00", "").splitlines()[0].split(", package")[0]
    device = f"cuda, {torch.cuda.device_count()} device(s)" if torch.cuda.is_available() else "cpu"
    lines = [f"MPI: {library}, thread level MPI_THREAD_{levels[MPI.Query_thread()]}",
             f"Horovod: {horovod_status()}",
             f"torch: {torch.__version__}, device {device}"]
    loaded = mpi_libraries()
    problems = []
    if len(loaded) > 1:
        problems.append(f"two MPI libraries are loaded ({', '.join(sorted(loaded))}); mpi4py and Horovod must be built "
                        "against one: remove .venv and the cached Horovod wheel, and run bash scripts/setup.sh")
    return lines, problems


def mpi_libraries(maps: str = "/proc/self/maps") -> set[str]:
    """Files of the MPI libraries in this process."""
    try:
        with open(maps, encoding="utf-8") as file:
            paths = {line.split()[-1] for line in file if "/" in line}
    except OSError:
        return set()
    return {os.path.realpath(path) for path in paths if os.path.basename(path).split(".so")[0] in ("libmpi", "libmpich")}


def describe_ranks(hosts: list[Host]) -> list[str]:
    """A line a rank."""
    lines = [f"ranks: {len(hosts)}"]
    for rank, host in enumerate(hosts):
        lines.append(f"  rank {rank}: {host.name}, CPUs {format_cpu_list(host.cpus)}, NUMA "
                     f"{format_cpu_list(host.numa_nodes)}, OMP_NUM_THREADS {host.omp_threads or 'not set'}, "
                     f"{format_bytes(host.memory_available)} of {format_bytes(host.memory_total)} memory available")
    return lines


def rank_problems(hosts: list[Host], threads: int) -> list[str]:
    """What is wrong with how the ranks sit."""
    out = []
    for rank, host in enumerate(hosts):
        want = max(threads, host.omp_threads)
        if want > len(host.cpus):
            out.append(f"rank {rank} may run on {len(host.cpus)} CPU(s) but has {want} threads; set train.threads and "
                       "OMP_NUM_THREADS to what the rank is bound to, or bind it to more")
    return out


def job_plan(config: Any, session: Any) -> tuple[list[str], list[str]]:
    """The plan of a job on this rank's node as lines, and its problems. Allocates nothing."""
    from hpc_ctr.train.job import default_store_dir
    from hpc_ctr.train.plan import plan_lines

    here = sum(host == session.hosts[session.rank] for host in session.hosts)
    lines, problems = plan_lines(config, here)
    where = default_store_dir(config)
    disk = disk_of(where)
    lines.append(f"storage.dir: {where} on {disk.mount} ({disk.kind}), {format_bytes(disk.free)} of "
                 f"{format_bytes(disk.total)} free")
    if not os.access(existing_parent(where), os.W_OK):
        problems.append(f"storage.dir: {where} cannot be written on {session.hosts[session.rank]}; "
                        "name a folder on a local disk that can")
    elif disk.free < 1 << 30:
        problems.append(f"storage.dir: only {format_bytes(disk.free)} are free on {disk.mount} of "
                        f"{session.hosts[session.rank]}; free some or name another disk")
    if disk.kind.startswith(("nfs", "lustre", "gpfs", "beegfs", "cifs", "ceph")):
        problems.append(f"storage.dir: {disk.mount} is a network file system ({disk.kind}); name a local disk, for cold "
                        "rows are read at random")
    return lines, problems
