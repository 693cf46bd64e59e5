"""Personalised all-to-all of rows: every rank sends a block of rows to every rank of a communicator."""

from typing import Any, Literal

import numpy as np

from hpc_ctr.comm.trace import Trace

# MPI counts are C ints; 1 GiB a message also keeps single messages away from library limits.
MAX_MESSAGE_BYTES = 1 << 30
_TAG_SUM, _TAG_SPREAD = 2, 3


def exchange_counts(comm: Any, counts: np.ndarray) -> np.ndarray:
    """What every rank will send here: int64 [N] from ``counts`` int64 [N], the rows for each rank. Collective."""
    if comm.size == 1:
        return np.array(counts, np.int64)
    received = np.empty(comm.size, np.int64)
    comm.Alltoall(np.ascontiguousarray(counts, np.int64), received)
    return received


def exchange_rows(comm: Any, rows: np.ndarray, send_counts: np.ndarray, recv_counts: np.ndarray, trace: Trace,
                  purpose: str, world_ranks: list[int] | None = None, tag: int = 1) -> np.ndarray:
    """Send ``rows`` [sum(send_counts), ...], blocks in rank order; get [sum(recv_counts), ...] in rank order.

    Collective over ``comm``. Both sides know the counts (see exchange_counts), so an empty pair costs nothing.
    With nothing but the own block the result is ``rows`` itself, not a copy. ``world_ranks`` translates the ranks
    of ``comm`` for the byte trace.
    """
    rank, size = comm.rank, comm.size
    if size == 1:
        return rows
    send_at = _starts(send_counts)
    recv_at = _starts(recv_counts)
    rows = np.ascontiguousarray(rows)
    out = np.empty((int(recv_at[-1]), *rows.shape[1:]), rows.dtype)
    row_bytes = int(rows.dtype.itemsize * np.prod(rows.shape[1:], dtype=np.int64))
    chunk = max(1, MAX_MESSAGE_BYTES // max(row_bytes, 1))
    requests = []
    with trace.exchange("all_to_all", purpose) as sent:
        for step in range(1, size):
            peer = (rank - step) % size
            for begin, end in _chunks(recv_at[peer], recv_at[peer + 1], chunk):
                requests.append(comm.Irecv(_as_bytes(out[begin:end]), peer, tag))
        for step in range(1, size):
            peer = (rank + step) % size
            sent(world_ranks[peer] if world_ranks else peer, int(send_counts[peer]) * row_bytes)
            for begin, end in _chunks(send_at[peer], send_at[peer + 1], chunk):
                requests.append(comm.Isend(_as_bytes(rows[begin:end]), peer, tag))
        out[recv_at[rank]:recv_at[rank + 1]] = rows[send_at[rank]:send_at[rank + 1]]
        _wait_all(requests)
    return out


def sum_blocks(comm: Any, flat: np.ndarray, bounds: np.ndarray, scratch: np.ndarray, trace: Trace, purpose: str,
               world_ranks: list[int]) -> None:
    """Sum one block a rank: block r of ``flat`` [n], from bounds[r] to bounds[r+1], becomes the sum over the ranks of
    ``comm`` at rank r, added in rank order; the other blocks are left as they are. Collective.

    bounds: int [size+1], the same on all ranks; a rank may have an empty block. scratch: of flat's dtype, with room for
    size times the largest block.
    """
    rank, size = comm.rank, comm.size
    if size == 1:
        return
    mine = flat[bounds[rank]:bounds[rank + 1]]
    parts = scratch[:size * len(mine)].reshape(size, len(mine))
    requests = []
    with trace.exchange("reduce_scatter", purpose) as sent:
        for step in range(1, size):
            if len(mine):
                peer = (rank - step) % size
                requests += [comm.Irecv(_as_bytes(part), peer, _TAG_SUM) for part in _cut(parts[peer])]
        for step in range(1, size):
            peer = (rank + step) % size
            block = flat[bounds[peer]:bounds[peer + 1]]
            if len(block):
                sent(world_ranks[peer], block.nbytes)
                requests += [comm.Isend(_as_bytes(part), peer, _TAG_SUM) for part in _cut(block)]
        _wait_all(requests)
    if not len(mine):
        return
    parts[rank] = mine
    np.add(parts[0], parts[1], out=mine)
    for part in parts[2:]:
        np.add(mine, part, out=mine)


def spread_blocks(comm: Any, flat: np.ndarray, bounds: np.ndarray, trace: Trace, purpose: str,
                  world_ranks: list[int]) -> None:
    """Give block r of ``flat`` from rank r of ``comm`` to all others, in place; as ``sum_blocks`` otherwise."""
    rank, size = comm.rank, comm.size
    if size == 1:
        return
    mine, requests = flat[bounds[rank]:bounds[rank + 1]], []
    with trace.exchange("all_gather", purpose) as sent:
        for step in range(1, size):
            peer = (rank - step) % size
            block = flat[bounds[peer]:bounds[peer + 1]]
            if len(block):
                requests += [comm.Irecv(_as_bytes(part), peer, _TAG_SPREAD) for part in _cut(block)]
        for step in range(1, size):
            peer = (rank + step) % size
            if len(mine):
                sent(world_ranks[peer], mine.nbytes)
                requests += [comm.Isend(_as_bytes(part), peer, _TAG_SPREAD) for part in _cut(mine)]
        _wait_all(requests)


def combine(comm: Any, array: np.ndarray, operation: Literal["SUM", "BOR"], trace: Trace, purpose: str) -> np.ndarray:
    """``array`` [n] of all ranks of ``comm``, which are all of the job, put together by one of MPI's operations.
    Collective. The order is the MPI library's affair: for what is the same in any order, or need not be."""
    from mpi4py import MPI

    if comm.size == 1:
        return array.copy()
    out = np.empty_like(array)
    with trace.exchange("allreduce", purpose) as sent:
        sent(*ring_share(len(array), comm.rank, comm.size, array.itemsize))
        comm.Allreduce(array, out, getattr(MPI, operation))
    return out


def sum_counts(comm: Any, counts: np.ndarray, trace: Trace, purpose: str) -> np.ndarray:
    """Sum of ``counts`` int64 [n], mostly zeros, over all ranks: what travels is a bit for each, and those that are not
    zero on some rank. Collective."""
    bits = combine(comm, np.packbits(counts != 0), "BOR", trace, purpose)
    some = np.unpackbits(bits, count=len(counts)).view(bool)
    out = np.zeros_like(counts)
    out[some] = combine(comm, counts[some], "SUM", trace, purpose)
    return out


def ring_share(count: int, rank: int, size: int, itemsize: int) -> tuple[int, int]:
    """(rank, bytes): to whom and how much a rank sends where a ring sums ``count`` elements. 2(size-1) times the array is
    sent by all together, the least there is: an estimate for sums whose messages are the MPI library's affair."""
    shares = np.diff(np.arange(size + 1) * count // size)
    unsent = shares[(rank + 1) % size] + shares[(rank + 2) % size]
    return (rank + 1) % size, int(2 * count - unsent) * itemsize


def _cut(array: np.ndarray) -> list[np.ndarray]:
    most = MAX_MESSAGE_BYTES // array.itemsize
    return [array[at:at + most] for at in range(0, len(array), most)]


def _wait_all(requests: list[Any]) -> None:
    from mpi4py import MPI

    MPI.Request.Waitall(requests)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array as uint8, so that MPI needs to know no record types."""
    return array.reshape(-1).view(np.uint8)


def _starts(counts: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _chunks(begin: int, end: int, chunk: int) -> list[tuple[int, int]]:
    return [(at, min(at + chunk, int(end))) for at in range(int(begin), int(end), chunk)]
