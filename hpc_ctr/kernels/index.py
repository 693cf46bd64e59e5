"""Open-addressing index from uint64 keys to int64 slots, over one plain array.

A bucket is one row of ``table``, uint64 [buckets, 2]: the key, and the slot plus one (0 = empty), so that
every uint64 is a valid key and a table of zeros is an empty index. The number of buckets is a power of two; a
key's bucket is its low bits (its high bits are its shard, and all keys of a rank share some of them), then
linear probing. Deletion shifts later entries back instead of leaving tombstones, so probes stay short under
churn. Keys are expected to be well mixed in their low bits.
"""

import numpy as np
from numba import njit

from hpc_ctr.kernels.memory import LazyArray, prefetch

MAX_LOAD = 0.75
BUCKET_BYTES = 16
_MIN_BUCKETS = 16
_AHEAD = 12


@njit(nogil=True, cache=True)
def table_lookup(table, buckets, keys, out):
    """``out[i]`` = slot of ``keys[i]``, or -1."""
    mask = np.uint64(buckets - 1)
    one = np.uint64(1)
    base = np.uint64(table.ctypes.data)
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(base + ((keys[i + _AHEAD] & mask) << np.uint64(4)))
        key = keys[i]
        b = key & mask
        out[i] = -1
        while table[b, 1] != 0:
            if table[b, 0] == key:
                out[i] = np.int64(table[b, 1] - one)
                break
            b = (b + one) & mask


@njit(nogil=True, cache=True)
def _place(table, mask, key, slot1):
    """Write one entry; True when the key was not there. The caller has made sure that a bucket is free."""
    b = key & mask
    while table[b, 1] != 0:
        if table[b, 0] == key:
            table[b, 1] = slot1
            return False
        b = (b + np.uint64(1)) & mask
    table[b, 0] = key
    table[b, 1] = slot1
    return True


@njit(nogil=True, cache=True)
def table_insert(table, buckets, keys, slots):
    """Insert or overwrite; returns how many keys were new."""
    mask = np.uint64(buckets - 1)
    base = np.uint64(table.ctypes.data)
    n = len(keys)
    new = 0
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(base + ((keys[i + _AHEAD] & mask) << np.uint64(4)))
        if _place(table, mask, keys[i], np.uint64(slots[i] + 1)):
            new += 1
    return new


@njit(nogil=True, cache=True)
def table_delete(table, buckets, keys, out):
    """Remove keys; ``out[i]`` = the slot that ``keys[i]`` had, or -1. Returns how many were removed."""
    mask = np.uint64(buckets - 1)
    one = np.uint64(1)
    removed = 0
    for i in range(len(keys)):
        key = keys[i]
        b = key & mask
        out[i] = -1
        while table[b, 1] != 0 and table[b, 0] != key:
            b = (b + one) & mask
        if table[b, 1] == 0:
            continue
        out[i] = np.int64(table[b, 1] - one)
        removed += 1
        hole = b
        b = (b + one) & mask
        while table[b, 1] != 0:
            # an entry may move back into the hole only when its home is not behind the hole
            if ((b - table[b, 0]) & mask) >= ((b - hole) & mask):
                table[hole, 0] = table[b, 0]
                table[hole, 1] = table[b, 1]
                hole = b
            b = (b + one) & mask
        table[hole, 1] = 0
    return removed


@njit(nogil=True, cache=True)
def table_rehash(source, source_buckets, target, target_buckets):
    """Insert all entries of one table into another, empty one."""
    mask = np.uint64(target_buckets - 1)
    for b in range(source_buckets):
        if source[b, 1] != 0:
            _place(target, mask, source[b, 0], source[b, 1])


@njit(nogil=True, cache=True)
def table_double(table, buckets):
    """Double the number of buckets in place; the rows from ``buckets`` to ``2 * buckets`` must be zero."""
    mask = np.uint64(2 * buckets - 1)
    first = 0
    while table[first, 1] != 0:
        first += 1
    # Entries before the first gap may have wrapped around the end: they are set aside and placed last. Every
    # other entry is placed anew in table order, at or before where it was, or in the upper half.
    aside = table[:first].copy()
    table[:first] = 0
    for b in range(first, buckets):
        if table[b, 1] != 0:
            key, slot1 = table[b, 0], table[b, 1]
            table[b, 1] = 0
            _place(table, mask, key, slot1)
    for i in range(first):
        _place(table, mask, aside[i, 0], aside[i, 1])


@njit(nogil=True, cache=True)
def table_entries(table, buckets, keys, slots):
    """Copy all entries out, in table order; returns their number."""
    n = 0
    for b in range(buckets):
        if table[b, 1] != 0:
            keys[n] = table[b, 0]
            slots[n] = np.int64(table[b, 1]) - 1
            n += 1
    return n


@njit(nogil=True, cache=True)
def table_probes(table, buckets):
    """Sum over the entries of their distance from home."""
    mask = np.uint64(buckets - 1)
    total = 0
    for b in range(buckets):
        if table[b, 1] != 0:
            total += np.int64((np.uint64(b) - table[b, 0]) & mask)
    return total


def buckets_for(rows: int) -> int:
    """Smallest number of buckets (a power of two) that holds ``rows`` entries within the load limit."""
    buckets = _MIN_BUCKETS
    while rows > int(buckets * MAX_LOAD):
        buckets *= 2
    return buckets


class KeyIndex:
    """Index of distinct uint64 keys to slots >= 0, growing by doubling.

    ``max_rows`` reserves address space for so many entries: growth up to there happens in place, without a
    copy of the table. One thread may write, or several read.
    """

    def __init__(self, max_rows: int = 0):
        self._lazy = LazyArray((buckets_for(max_rows), 2), np.uint64)
        self.table = self._lazy.array
        self.buckets = _MIN_BUCKETS
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets in use (not of the reserved address space)."""
        return self.buckets * BUCKET_BYTES

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Slots int64 [n] of ``keys`` uint64 [n]; -1 where a key is missing."""
        slots = np.empty(len(keys), np.int64)
        table_lookup(self.table, self.buckets, keys, slots)
        return slots

    def insert(self, keys: np.ndarray, slots: np.ndarray) -> int:
        """Insert or overwrite ``keys`` uint64 [n] with ``slots`` int64 [n]; returns how many were new."""
        self.reserve(self.count + len(keys))
        new = int(table_insert(self.table, self.buckets, keys, slots))
        self.count += new
        return new

    def change(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Give ``keys`` uint64 [n], all of which are there, other ``slots`` int64 [n]."""
        if table_insert(self.table, self.buckets, keys, slots):
            raise KeyError("a key that was to change is not in the index")

    def delete(self, keys: np.ndarray) -> np.ndarray:
        """Remove ``keys`` uint64 [n]; returns the slots int64 [n] they had, -1 where a key was missing."""
        slots = np.empty(len(keys), np.int64)
        self.count -= int(table_delete(self.table, self.buckets, keys, slots))
        return slots

    def reserve(self, rows: int) -> None:
        """Grow so that ``rows`` entries fit."""
        wanted = buckets_for(rows)
        if wanted > len(self.table):
            larger = LazyArray((wanted, 2), np.uint64)
            table_rehash(self.table, self.buckets, larger.array, wanted)
            self._lazy, self.table, self.buckets = larger, larger.array, wanted
        while self.buckets < wanted:
            table_double(self.table, self.buckets)
            self.buckets *= 2

    def rebuild(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Replace the contents, with the fewest buckets that will do; the rest of the memory is given
        back."""
        self._lazy.release()
        self.buckets, self.count = _MIN_BUCKETS, 0
        # an empty table may be given its final size at once: there is nothing to move
        self.buckets = min(buckets_for(len(keys)), len(self.table))
        self.insert(keys, slots)

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys uint64 [count] and slots int64 [count], in table order."""
        keys, slots = np.empty(self.count, np.uint64), np.empty(self.count, np.int64)
        table_entries(self.table, self.buckets, keys, slots)
        return keys, slots

    def mean_probe(self) -> float:
        """Mean distance of an entry from its home bucket (0 = every entry is at home)."""
        return float(table_probes(self.table, self.buckets)) / max(1, self.count)
