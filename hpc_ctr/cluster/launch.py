"""How this process was started, and whether MPI saw the same."""

import os
from collections.abc import Mapping
from pathlib import Path

from hpc_ctr.comm import session as mpi
from hpc_ctr.errors import UsageError

_MPI_LIBRARIES = ("libmpi.so", "libmpich.so", "libmpi_cray.so", "libmpi_mt.so")
# SLURM_STEP_ID of what is no task of a step: the batch script and the external container
_NO_STEP = {"", "4294967290", "4294967291", "4294967292", "batch", "extern"}


def launched_size(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """(what says so, number of processes that the launcher started), or None without a launcher.

    mpirun goes first: inside a Slurm job its daemons are tasks of a step of their own, whose count is that of the nodes.
    """
    names = ["OMPI_COMM_WORLD_SIZE"]
    if "MPI_LOCALNRANKS" in environ:  # MPICH's mpiexec; srun sets PMI_SIZE too
        names.append("PMI_SIZE")
    # the parts of a heterogeneous job count their own tasks only
    if environ.get("SLURM_STEP_ID", "") not in _NO_STEP and "SLURM_HET_SIZE" not in environ:
        names += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    for name in names:
        if environ.get(name, "").isdigit():
            return name, int(environ[name])
    return None


def size_problem(size: int, environ: Mapping[str, str]) -> str | None:
    """A sentence with the remedy when MPI's world has another size than the launcher started processes; else None.

    srun without the right --mpi, or the mpirun of another MPI, starts N processes that each see a world of one.
    """
    launched = launched_size(environ)
    if launched is None or launched[1] == size:
        return None
    name, count = launched
    remedy = ("start them with srun --mpi=pmix (srun --mpi=list shows what there is), or with mpirun"
              if name.startswith("SLURM") else
              "use the mpirun of the MPI library that mpi4py loads (the one in the environment's bin folder)")
    return f"MPI sees {size} rank{'s' * (size != 1)} but {name} is {count}: they do not form one job; {remedy}"


def start_job() -> mpi.Session:
    """The MPI session of a job. Raises UsageError when what was started is not one job: N singletons would train N
    models into one run folder."""
    session = mpi.start()
    problem = size_problem(session.size, os.environ)
    if problem:
        raise UsageError(problem)
    return session


def mpi_libraries(maps: str | None = None) -> list[str]:
    """Paths of the MPI libraries that are loaded in this process, from the text of /proc/self/maps."""
    if maps is None:
        maps = Path("/proc/self/maps").read_text()
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if path.rpartition("/")[2].startswith(_MPI_LIBRARIES))
