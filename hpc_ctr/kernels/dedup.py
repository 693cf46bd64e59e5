"""Distinct keys of a batch or a pass, in the order in which they first occur, by hashing instead of
sorting."""

import numpy as np
from numba import njit

from hpc_ctr.kernels.memory import prefetch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_AHEAD = 12


@njit(nogil=True, cache=True)
def _scan(keys, begin, table, ids, bits, distinct, count, inverse, counts, limit):
    """Go on with ``keys[begin:]`` until more than ``limit`` distinct keys are known; returns (position,
    count)."""
    shift = np.uint64(64 - bits)
    mask = np.uint64((1 << bits) - 1)
    table_base = np.uint64(table.ctypes.data)
    ids_base = np.uint64(ids.ctypes.data)
    n = len(keys)
    counting = len(counts) > 0
    for i in range(begin, n):
        if count >= limit:
            return i, count
        if i + _AHEAD < n:
            home = (keys[i + _AHEAD] * _GOLDEN) >> shift
            prefetch(table_base + (home << np.uint64(3)))
            prefetch(ids_base + home * np.uint64(ids.itemsize))
        key = keys[i]
        b = (key * _GOLDEN) >> shift
        while True:
            place = ids[b]
            if place == 0:
                table[b] = key
                distinct[count] = key
                count += 1
                ids[b] = count
                place = ids[b]
                break
            if table[b] == key:
                break
            b = (b + np.uint64(1)) & mask
        inverse[i] = place - 1
        if counting:
            counts[place - 1] += 1
    return n, count


@njit(nogil=True, cache=True)
def _refill(distinct, count, table, ids, bits):
    shift = np.uint64(64 - bits)
    mask = np.uint64((1 << bits) - 1)
    for i in range(count):
        b = (distinct[i] * _GOLDEN) >> shift
        while ids[b] != 0:
            b = (b + np.uint64(1)) & mask
        table[b] = distinct[i]
        ids[b] = i + 1


def dedup(keys: np.ndarray, counts: bool = False) -> tuple[np.ndarray, ...]:
    """Distinct keys and where each occurrence went.

    ``keys``: uint64 [n], any values. Returns ``(distinct, inverse)``: uint64 [u] in order of first
    occurrence, and int32 [n] (int64 when n >= 2^31) with ``distinct[inverse] == keys``; with ``counts`` also
    how often each occurs, int64 [u]. The result depends on the keys alone. Working memory: 24 to 48 bytes a
    distinct key.
    """
    keys = np.ascontiguousarray(keys, dtype=np.uint64)
    n = len(keys)
    kind = np.int32 if n < 2**31 - 1 else np.int64
    inverse = np.empty(n, kind)
    # numpy asks the system for zero or untouched pages: room for n distinct keys costs only what is used
    distinct = np.empty(n, np.uint64)
    tally = np.zeros(n if counts else 0, np.int64)
    bits, begin, count = 10, 0, 0
    while True:
        table, ids = np.empty(1 << bits, np.uint64), np.zeros(1 << bits, kind)
        _refill(distinct, count, table, ids, bits)
        begin, count = _scan(keys, begin, table, ids, bits, distinct, count, inverse, tally, (1 << bits) // 2)
        if begin == n:
            break
        # grow fourfold while small and few keys repeat, twofold when the table is large
        bits += 2 if bits < 20 else 1
    result = (distinct[:count].copy(), inverse)
    return (*result, tally[:count].copy()) if counts else result
