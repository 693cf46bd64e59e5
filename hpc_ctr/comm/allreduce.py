"""Sums of tensors over ranks: one small interface, carried by Horovod, by MPI or by nothing at all.

The dense merge and the gradient exchange need exactly one collective, so this is the only place that knows
which library carries it. All three implementations leave the same bits on every rank.
"""

import abc
import contextlib
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hpc_ctr.comm.exchange import ring_share, spread_blocks, sum_blocks
from hpc_ctr.comm.trace import Trace
from hpc_ctr.errors import HpcCtrError, UsageError

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
BACKENDS = ("auto", "horovod", "mpi")

# A rank that is late for a collective is reported after the first time and ends the job after the second.
STALL_DEFAULTS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600"}


class Allreduce(abc.ABC):
    """Interface: in-place sums over ``size`` ranks, and counters of what was handed in.

    bytes_by_name[name]: payload bytes handed in under that name (element size x count; not multiplied by what
    a library's algorithm sends for them). calls_by_name and seconds_by_name go with it. trace: counts what is sent to
    whom; through Horovod, an estimate. note: one sentence when the backend is not what one would expect, else "". peers:
    what a rank of the sum is: "rank" or "node".
    """

    backend = "none"
    peers = "rank"

    def __init__(self, rank: int, size: int, note: str = "", trace: Trace | None = None) -> None:
        self.rank = rank
        self.size = size
        self.note = note
        self.trace = trace or Trace(["self"] * max(size, 1))
        self.bytes_by_name: Counter[str] = Counter()
        self.calls_by_name: Counter[str] = Counter()
        self.seconds_by_name: Counter[str] = Counter()

    @property
    def seconds(self) -> float:
        """Wall time spent in all sums so far, waiting for late ranks included."""
        return float(sum(self.seconds_by_name.values()))

    def sum_(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Replace each tensor by its sum over the ranks, in place. Collective.

        tensors: contiguous, of any shapes (zero elements too), float32, float64, int32 or int64, on any
        device; shapes and dtypes must be the same on all ranks. name: the same on all ranks. Raises
        ValueError for other tensors, before anything is sent.
        """
        begin = time.perf_counter()
        for group, full_name in self._groups(tensors, name):
            self._sum(group, full_name)
        self.seconds_by_name[name] += time.perf_counter() - begin

    def start_(self, tensors: Sequence[torch.Tensor], name: str) -> Callable[[], None]:
        """Begin ``sum_`` and return at once; the sums are in the tensors, which are not to be touched until then, when
        the function that is returned has returned. Collective.

        One sum at a time may be under way; others by ``sum_`` may be made meanwhile. Calling the function again does
        nothing. seconds_by_name counts what was waited for.
        """
        waits = [self._start(group, full_name) for group, full_name in self._groups(tensors, name)]

        def wait() -> None:
            begin = time.perf_counter()
            while waits:
                waits.pop(0)()
            self.seconds_by_name[name] += time.perf_counter() - begin

        return wait

    def _groups(self, tensors: Sequence[torch.Tensor], name: str) -> list[tuple[list[torch.Tensor], str]]:
        """Flat tensors of one dtype and a name for each such group; counts them as handed in."""
        flats = [_flat(tensor) for tensor in tensors]
        self.bytes_by_name[name] += sum(flat.numel() * flat.element_size() for flat in flats)
        self.calls_by_name[name] += 1
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for flat in flats if self.size > 1 else ():
            if flat.numel():
                by_dtype.setdefault(flat.dtype, []).append(flat)
        return [(group, f"{name}.{str(dtype).removeprefix('torch.')}") for dtype, group in by_dtype.items()]

    @abc.abstractmethod
    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        """Sum flat, non-empty tensors of one dtype over the ranks (two or more), in place."""

    @abc.abstractmethod
    def _start(self, flats: list[torch.Tensor], name: str) -> Callable[[], None]:
        """As ``_sum``, but only begin; the function that is returned waits for the end."""


class SerialAllreduce(Allreduce):
    """One rank: a sum over it changes nothing; the counters still count."""

    backend = "serial"

    def __init__(self, note: str = "") -> None:
        super().__init__(0, 1, note)

    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        pass  # the sum over one rank is there already

    def _start(self, flats: list[torch.Tensor], name: str) -> Callable[[], None]:
        return lambda: None


class BlockwiseAllreduce(Allreduce):
    """Base of the sums that this package sends itself, one contiguous piece of memory at a time.

    piece_elements: how many elements travel at once; bounds the scratch memory (two pieces) and keeps every
    count far below 2^31. Tensors on a GPU, and pieces that lie in several tensors, are copied together in host memory;
    others travel from where they are. A sum that was started is made by a thread with communicators of its own.
    """

    def __init__(self, rank: int, size: int, note: str, trace: Trace | None, piece_elements: int) -> None:
        super().__init__(rank, size, note, trace)
        self.piece_elements = piece_elements
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._aside: BlockwiseAllreduce | None = None
        self._thread: ThreadPoolExecutor | None = None

    @abc.abstractmethod
    def _sum_array(self, flat: np.ndarray, purpose: str) -> None:
        """Sum ``flat`` [n > 0] over the ranks, in place."""

    @abc.abstractmethod
    def _twin(self) -> "BlockwiseAllreduce":
        """The same on communicators of its own, with a trace that is not this one. Collective."""

    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        purpose = name.rpartition(".")[0]
        for piece in _pieces(flats, self.piece_elements):
            if len(piece) == 1 and piece[0].device.type == "cpu":
                self._sum_array(piece[0].numpy(), purpose)
                continue
            together = self._scratch("together", piece[0].dtype, sum(part.numel() for part in piece))
            parts = together.split([part.numel() for part in piece])
            for part, into in zip(piece, parts):
                into.copy_(part)
            self._sum_array(together.numpy(), purpose)
            for part, into in zip(piece, parts):
                part.copy_(into)

    def _start(self, flats: list[torch.Tensor], name: str) -> Callable[[], None]:
        if self._aside is None or self._thread is None:
            self._aside, self._thread = self._twin(), ThreadPoolExecutor(1, "allreduce")
        aside = self._aside
        under_way = self._thread.submit(aside._sum, flats, name)

        def wait() -> None:
            under_way.result()
            self.trace.take(aside.trace)
            aside.trace.clear()

        return wait

    def _scratch(self, use: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        """[count] elements of memory that is kept from call to call; their values are anything."""
        memory = self._memory.get((use, dtype))
        if memory is None or memory.numel() < count:
            memory = self._memory[use, dtype] = torch.empty(count, dtype=dtype)
        return memory[:count]

    def _parts(self, like: np.ndarray, count: int) -> np.ndarray:
        return self._scratch("parts", torch.from_numpy(like[:0]).dtype, count).numpy()


class MpiAllreduce(BlockwiseAllreduce):
    """Sums through mpi4py, added in rank order: the same bits on every rank, run and MPI library.

    A library's own reduction may pick its order by message size, arrival or topology. Here every rank
    receives its share of all ranks' values, adds them in rank order, and gives the result to all others: the bytes of
    a ring. ranks: what the ranks of ``comm`` are called in ``trace``.
    """

    backend = "mpi"

    def __init__(self, comm: Any, note: str = "", piece_elements: int = 1 << 23, trace: Trace | None = None,
                 ranks: list[int] | None = None) -> None:
        super().__init__(comm.rank, comm.size, note, trace, piece_elements)
        self.comm = comm
        self.ranks = ranks or list(range(comm.size))

    def _twin(self) -> BlockwiseAllreduce:
        return MpiAllreduce(self.comm.Dup(), piece_elements=self.piece_elements, trace=self.trace.ahead(),
                            ranks=self.ranks)

    def _sum_array(self, flat: np.ndarray, purpose: str) -> None:
        bounds = even_bounds(len(flat), self.size, self.size)
        parts = self._parts(flat, len(flat) + self.size ** 2)
        sum_blocks(self.comm, flat, bounds, parts, self.trace, purpose, self.ranks)
        spread_blocks(self.comm, flat, bounds, self.trace, purpose, self.ranks)


class HorovodAllreduce(Allreduce):
    """Sums through Horovod's grouped allreduce.

    comm must span the ranks of MPI's COMM_WORLD in its order. Horovod is imported and started here, after
    MPI. Raises UsageError where it is missing or built without MPI.
    """

    backend = "horovod"
    # Horovod passes a fused group's element count to MPI as one int.
    piece_elements = 1 << 30

    def __init__(self, comm: Any, note: str = "", trace: Trace | None = None) -> None:
        from mpi4py import MPI

        if MPI.Comm.Compare(comm, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
            raise UsageError("merge.backend: horovod spans all ranks of the job and cannot run on a part of "
                             "them; set merge.backend: mpi")
        hvd, reason = _load_horovod()
        if hvd is None:
            raise UsageError(f"merge.backend: horovod cannot be used ({reason}); install Horovod 0.28.1 with "
                             "MPI and PyTorch, or set merge.backend: mpi")
        for variable, seconds in STALL_DEFAULTS.items():
            os.environ.setdefault(variable, seconds)
        if not hvd.is_initialized():
            hvd.init()
        if (hvd.rank(), hvd.size()) != (comm.rank, comm.size):
            raise UsageError(f"merge.backend: Horovod sees rank {hvd.rank()} of {hvd.size()} where MPI has "
                             f"rank {comm.rank} of {comm.size}, so it was built for another MPI library; "
                             "build it again with this environment's mpicxx, or set merge.backend: mpi")
        super().__init__(comm.rank, comm.size, note, trace)
        self._hvd = hvd

    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        self._start(flats, name)()

    def _start(self, flats: list[torch.Tensor], name: str) -> Callable[[], None]:
        under_way = self.trace.begin("allreduce", name.rpartition(".")[0])
        under_way.sent(*ring_share(sum(flat.numel() for flat in flats), self.rank, self.size, flats[0].element_size()))
        handles = [self._hvd.grouped_allreduce_async_(piece, name=f"hpc_ctr.{name}.{number}", op=self._hvd.Sum)
                   for number, piece in enumerate(_pieces(flats, self.piece_elements))]

        def wait() -> None:
            try:
                for handle in handles:
                    self._hvd.synchronize(handle)
                under_way.end()
            except self._hvd.HorovodInternalError as error:
                limit = os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
                raise HpcCtrError(f"Horovod could not finish the sum {name}: another rank failed or was more "
                                  f"than {limit} s late ({error})") from error

        return wait


def even_bounds(count: int, shares: int, ranks: int) -> np.ndarray:
    """Bounds int64 [ranks+1] of ``count`` elements in even blocks for the first ``shares`` ranks, none for the others."""
    return np.minimum(np.arange(ranks + 1), shares) * count // shares


def make_allreduce(backend: str = "auto", comm: Any = None, trace: Trace | None = None) -> Allreduce:
    """The implementation for ``merge.backend`` on comm (mpi4py's, or None for one process). Collective.

    "horovod" and "mpi" are taken as asked; "auto" is Horovod when every rank can import one that was built
    with MPI, else mpi with the reason in ``note``. One rank needs neither. Raises UsageError.
    """
    if backend not in BACKENDS:
        raise UsageError(f"merge.backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if comm is None or comm.size == 1:
        return SerialAllreduce("" if backend == "auto" else f"one rank: {backend} has nothing to do")
    if backend == "mpi":
        return MpiAllreduce(comm, trace=trace)
    if backend == "horovod":
        return HorovodAllreduce(comm, trace=trace)
    reason = _why_not_horovod(comm)
    # Ranks may see different installations; they must take the same way.
    reasons = [text for text in comm.allgather(reason) if text]
    if reasons:
        return MpiAllreduce(comm, f"merge.backend auto took mpi: {reasons[0]}", trace=trace)
    return HorovodAllreduce(comm, trace=trace)


def horovod_status() -> str:
    """One line about this environment's Horovod: version and libraries, or why it cannot be used."""
    hvd, reason = _load_horovod()
    if hvd is None:
        return reason
    import horovod

    built = [label for label, yes in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built()),
                                      ("NCCL", bool(hvd.nccl_built()))) if yes]
    return f"Horovod {horovod.__version__}, built with {', '.join(built)}"


def _why_not_horovod(comm: Any) -> str:
    from mpi4py import MPI

    if MPI.Comm.Compare(comm, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
        return "the communicator is only a part of the job"
    return _load_horovod()[1]


def _load_horovod() -> tuple[Any, str]:
    """(horovod.torch, "") or (None, reason)."""
    said = io.StringIO()
    try:
        # Horovod prints, and goes on half loaded, when its PyTorch extension is missing.
        with contextlib.redirect_stdout(said):
            import horovod.torch as hvd
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "horovod":
            return None, "Horovod is not installed"
        return None, f"Horovod does not load: {error}"
    except Exception as error:  # an extension built for another torch or MPI fails in the dynamic loader
        text = str(error).splitlines() or [type(error).__name__]
        return None, f"Horovod does not load: {text[0]}"
    if not hasattr(hvd, "mpi_built"):
        return None, "Horovod was built without PyTorch"
    if not hvd.mpi_built():
        return None, "Horovod was built without MPI"
    return hvd, ""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"allreduce: dtype {tensor.dtype} is not one of {', '.join(map(str, DTYPES))}")
    if not tensor.is_contiguous():
        raise ValueError("allreduce: tensors must be contiguous")
    return tensor.detach().view(-1)


def _pieces(flats: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """The concatenation of ``flats``, cut into lists of slices with at most ``limit`` elements together."""
    piece: list[torch.Tensor] = []
    room = limit
    for flat in flats:
        begin = 0
        while begin < flat.numel():
            part = flat[begin:begin + room]
            piece.append(part)
            begin += part.numel()
            room -= part.numel()
            if room == 0:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece

