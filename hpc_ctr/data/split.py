"""Which rows train and which test."""

from collections.abc import Callable, Iterable

import numpy as np

from hpc_ctr.data.keys import mix
from hpc_ctr.kernels.hashing import mix_values

_HASH_SPLIT = 3
_CACHE_ROWS = 1 << 22
_ROUND_BITS = 16


def hash_test_mask(row_hash: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool [n], True = test: rows with the same text always fall on the same side."""
    mixed = mix_values(row_hash, np.uint64(mix(_HASH_SPLIT, seed)))
    return mixed < np.uint64(int(share * 2.0**64))


def time_bits(time: np.ndarray) -> np.ndarray:
    """uint64 [n] that sort like the float64 ``time``."""
    bits = (time + 0.0).view(np.uint64)
    negative = bits >> np.uint64(63) != 0
    return np.where(negative, ~bits, bits | np.uint64(1 << 63))


def bits_time(bits: int) -> float:
    """The float64 whose ``time_bits`` are ``bits``."""
    bits = bits & ((1 << 63) - 1) if bits >> 63 else bits ^ ((1 << 64) - 1)
    return float(np.array([bits], np.uint64).view(np.float64)[0])


def time_threshold(times: Callable[[], Iterable[np.ndarray]], share: float, comm) -> tuple[float, int]:
    """(time of the last training row, rows in all): exactly round(n * share) rows of the n of all ranks come after the
    place of that row in time order; rows with the same time train too.

    times: gives this rank's times anew at each call, float64 arrays. comm: mpi4py communicator or None; collective.
    Selection by radix: histograms of 16 bits of the time at a time, summed over the ranks, so that memory stays
    bounded; candidates are kept once they are few, and the data is read again until then.
    Raises what ``times`` raises, on all ranks.
    """
    prefix, wanted, total = 0, -1, 0
    kept: list[np.ndarray] | None = None
    for shift in range(64 - _ROUND_BITS, -1, -_ROUND_BITS):
        counts = np.zeros(1 << _ROUND_BITS, np.int64)
        keep: list[np.ndarray] | None = []
        room, error = _CACHE_ROWS, None
        try:
            for bits in (kept if kept is not None else map(time_bits, times())):
                if shift < 64 - _ROUND_BITS:
                    bits = bits[bits >> np.uint64(shift + _ROUND_BITS) == np.uint64(prefix)]
                digit = (bits >> np.uint64(shift)) & np.uint64((1 << _ROUND_BITS) - 1)
                counts += np.bincount(digit.astype(np.int64), minlength=1 << _ROUND_BITS)
                room -= len(bits)
                if room < 0:
                    keep = None
                elif keep is not None:
                    keep.append(bits)
        except Exception as caught:
            error = caught
        raise_together(error, comm)
        kept = keep
        if comm is not None:
            counts = comm.allreduce(counts)
        if wanted < 0:
            total = int(counts.sum())
            wanted = total - round(total * share) - 1
            if wanted < 0:
                return float("-inf"), total
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, wanted, side="right"))
        wanted -= int(ends[digit] - counts[digit])
        prefix = (prefix << _ROUND_BITS) | digit
    return bits_time(prefix), total


def raise_together(error: Exception | None, comm) -> None:
    """Raises the first rank's error on every rank, so that none waits for one that is gone."""
    if comm is None:
        if error is not None:
            raise error
        return
    for first in comm.allgather(error):
        if first is not None:
            raise first
