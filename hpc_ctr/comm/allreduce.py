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
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hpc_ctr.errors import HpcCtrError, UsageError

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
BACKENDS = ("auto", "horovod", "mpi")

# A rank that is late for a collective is reported after the first time and ends the job after the second.
STALL_DEFAULTS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600"}


class Allreduce(abc.ABC):
    """Interface: in-place sums over ``size`` ranks, and counters of what was handed in.

    bytes_by_name[name]: payload bytes handed in under that name (element size x count; not multiplied by what
    a library's algorithm sends for them). calls_by_name and seconds_by_name go with it. note: one sentence
    when the backend is not what one would expect, else "".
    """

    backend = "none"

    def __init__(self, rank: int, size: int, note: str = "") -> None:
        self.rank = rank
        self.size = size
        self.note = note
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
        flats = [_flat(tensor) for tensor in tensors]
        begin = time.perf_counter()
        if self.size > 1:
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for flat in flats:
                if flat.numel():
                    by_dtype.setdefault(flat.dtype, []).append(flat)
            for dtype, group in by_dtype.items():
                self._sum(group, f"{name}.{str(dtype).removeprefix('torch.')}")
        self.seconds_by_name[name] += time.perf_counter() - begin
        self.bytes_by_name[name] += sum(flat.numel() * flat.element_size() for flat in flats)
        self.calls_by_name[name] += 1

    @abc.abstractmethod
    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        """Sum flat, non-empty tensors of one dtype over the ranks (two or more), in place."""


class SerialAllreduce(Allreduce):
    """One rank: a sum over it changes nothing; the counters still count."""

    backend = "serial"

    def __init__(self, note: str = "") -> None:
        super().__init__(0, 1, note)

    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        pass  # the sum over one rank is there already


class MpiAllreduce(Allreduce):
    """Sums through mpi4py, added in rank order: the same bits on every rank, run and MPI library.

    A library's own reduction may pick its order by message size, arrival or topology. Here every rank
    receives its share of all ranks' values (Alltoall), adds them in rank order, and passes the result on
    (Allgather): the bytes of a ring. Tensors on a GPU are staged through host memory.
    piece_elements: how many elements travel at once; bounds the scratch memory (two pieces) and keeps every
    count far below 2^31.
    """

    backend = "mpi"

    def __init__(self, comm: Any, note: str = "", piece_elements: int = 1 << 23) -> None:
        super().__init__(comm.rank, comm.size, note)
        self.comm = comm
        self.piece_elements = piece_elements
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        for piece in _pieces(flats, self.piece_elements):
            self._sum_piece(piece)

    def _sum_piece(self, slices: list[torch.Tensor]) -> None:
        total = sum(part.numel() for part in slices)
        block = -(-total // self.size)
        send, recv = self._buffers(slices[0].dtype, block * self.size)
        begin = 0
        for part in slices:
            send[begin:begin + part.numel()].copy_(part)
            begin += part.numel()
        send[total:] = 0
        self.comm.Alltoall(send.numpy(), recv.numpy())
        shares = recv.view(self.size, block)
        mine = shares[0]
        for share in shares[1:]:
            mine.add_(share)
        self.comm.Allgather(mine.numpy(), send.numpy())
        begin = 0
        for part in slices:
            part.copy_(send[begin:begin + part.numel()])
            begin += part.numel()

    def _buffers(self, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < 2 * count:
            scratch = self._scratch[dtype] = torch.empty(2 * count, dtype=dtype)
        return scratch[:count], scratch[count:2 * count]


class HorovodAllreduce(Allreduce):
    """Sums through Horovod's grouped allreduce.

    comm must span the ranks of MPI's COMM_WORLD in its order. Horovod is imported and started here, after
    MPI. Raises UsageError where it is missing or built without MPI.
    """

    backend = "horovod"
    # Horovod passes a fused group's element count to MPI as one int.
    piece_elements = 1 << 30

    def __init__(self, comm: Any, note: str = "") -> None:
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
        super().__init__(comm.rank, comm.size, note)
        self._hvd = hvd

    def _sum(self, flats: list[torch.Tensor], name: str) -> None:
        try:
            for number, piece in enumerate(_pieces(flats, self.piece_elements)):
                self._hvd.grouped_allreduce_(piece, name=f"hpc_ctr.{name}.{number}", op=self._hvd.Sum)
        except self._hvd.HorovodInternalError as error:
            limit = os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
            raise HpcCtrError(f"Horovod could not finish the sum {name}: another rank failed or was more "
                              f"than {limit} s late ({error})") from error


def make_allreduce(backend: str = "auto", comm: Any = None) -> Allreduce:
    """The implementation for ``merge.backend`` on comm (mpi4py's, or None for one process). Collective.

    "horovod" and "mpi" are taken as asked; "auto" is Horovod when every rank can import one that was built
    with MPI, else mpi with the reason in ``note``. One rank needs neither. Raises UsageError.
    """
    if backend not in BACKENDS:
        raise UsageError(f"merge.backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if comm is None or comm.size == 1:
        return SerialAllreduce("" if backend == "auto" else f"one rank: {backend} has nothing to do")
    if backend == "mpi":
        return MpiAllreduce(comm)
    if backend == "horovod":
        return HorovodAllreduce(comm)
    reason = _why_not_horovod(comm)
    # Ranks may see different installations; they must take the same way.
    reasons = [text for text in comm.allgather(reason) if text]
    if reasons:
        return MpiAllreduce(comm, f"merge.backend auto took mpi: {reasons[0]}")
    return HorovodAllreduce(comm)


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

