"""The host-memory tier: records in one slab, an index by key, and eviction by how warm a row is."""

import numpy as np

from hpc_ctr.kernels import slab as kernels
from hpc_ctr.kernels.index import BUCKET_BYTES, MAX_LOAD, KeyIndex, buckets_for
from hpc_ctr.kernels.memory import LazyArray
from hpc_ctr.storage.record import RecordLayout

LIVE, DIRTY, PINNED = 1, 2, 4
EVICT_SHARE = 16            # an eviction takes at least a 16th of the capacity
FLOOR_ROWS = 64             # the least capacity that is worth running with
HALF_LIFE = 16.0            # passes after which a use counts half
# arrays beside the slab: key, step count, location in the cold tier, flags, pass of the last use, warmth then
_COLUMNS = {"keys": np.uint64, "t": np.uint32, "cold": np.int64, "flags": np.uint8, "used": np.uint32,
            "warmth": np.float32}
_META_BYTES = sum(np.dtype(dtype).itemsize for dtype in _COLUMNS.values())


def row_bytes(layout: RecordLayout) -> int:
    """Bytes of a cached row without its share of the index: the record's stride and 29 bytes beside it."""
    return layout.stride_bytes + _META_BYTES


def bytes_for(capacity: int, layout: RecordLayout) -> int:
    """Bytes of a full cache of so many rows: slab, arrays beside it, index, list of free slots."""
    index = buckets_for(capacity) * BUCKET_BYTES
    return capacity * row_bytes(layout) + index + 8 * (capacity // EVICT_SHARE + 1)


def capacity_for(budget: int, layout: RecordLayout) -> int:
    """The most rows whose cache takes at most ``budget`` bytes; 0 when not even the smallest fits."""
    best, buckets = 0, buckets_for(0)
    while buckets * BUCKET_BYTES < budget:
        rest = budget - buckets * BUCKET_BYTES - 8
        best = max(best, min(int(buckets * MAX_LOAD), int(rest / (row_bytes(layout) + 8 / EVICT_SHARE))))
        buckets *= 2
    return best


class HostCache:
    """Up to ``capacity`` rows by slot. Memory is taken from the system as slots are first used.

    It neither reads nor writes files: the caller evicts (``coldest``, then ``drop``) and makes sure that
    dirty rows are kept elsewhere first. ``cold[slot]`` is the caller's note of where the cold tier has the
    row (-1: unknown). One thread uses it.
    """

    def __init__(self, layout: RecordLayout, capacity: int):
        self.layout = layout
        self.now = 0
        self.count = self.high = 0      # rows; slots that were ever used
        self._free = np.empty(0, np.int64)
        self._reserve(capacity)

    def _reserve(self, capacity: int) -> None:
        self.capacity = self._reserved = capacity
        self._lazy = {"slab": LazyArray((capacity, self.layout.stride_bytes // 4), np.uint32)}
        for name, dtype in _COLUMNS.items():
            self._lazy[name] = LazyArray((capacity,), dtype)
        for name, lazy in self._lazy.items():
            setattr(self, name, lazy.array)
        self.index = KeyIndex(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes in use: slots ever touched, the index, the free list."""
        return self.high * row_bytes(self.layout) + self.index.nbytes + self._free.nbytes

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Slots int64 [n] of keys, -1 where missing."""
        return self.index.lookup(keys)

    def touch(self, slots: np.ndarray) -> None:
        """Count one use, in the present pass, of each slot >= 0."""
        kernels.warm(self.used, self.warmth, slots, self.now, HALF_LIFE)

    def read(self, slots: np.ndarray, targets: np.ndarray, words: np.ndarray, t: np.ndarray) -> None:
        """Copy slots (those >= 0) to rows ``targets`` of ``words`` uint32 [*, W] and ``t`` uint32."""
        kernels.gather(self.slab, self.t, slots, targets, words, t)

    def write(self, slots: np.ndarray, sources: np.ndarray, words: np.ndarray, t: np.ndarray) -> None:
        """Overwrite slots (those >= 0) from rows ``sources`` of ``words`` and ``t``; they are dirty
        afterwards."""
        kernels.scatter(self.slab, self.t, slots, sources, words, t)
        self.flags[slots[slots >= 0]] |= DIRTY

    def insert(self, keys: np.ndarray, sources: np.ndarray, words: np.ndarray, t: np.ndarray,
               cold: np.ndarray, dirty: bool) -> None:
        """Add rows for distinct keys that are not cached; there must be room. They count as used once."""
        n = len(keys)
        if n == 0:
            return
        reused = self._free[max(0, len(self._free) - n):]
        slots = np.concatenate([reused, np.arange(self.high, self.high + n - len(reused))])
        if self.count + n > self.capacity:
            raise ValueError("the host cache is full")
        if self.index.insert(keys, slots) != n:
            self.index.delete(keys)
            raise ValueError("keys must be distinct")
        self._free = self._free[:len(self._free) - len(reused)].copy()
        self.high += n - len(reused)
        self.count += n
        kernels.scatter(self.slab, self.t, slots, sources, words, t)
        self.keys[slots], self.cold[slots] = keys, cold
        self.flags[slots] = LIVE | DIRTY if dirty else LIVE
        self.used[slots], self.warmth[slots] = self.now, 1.0

    def slots_where(self, flags: int) -> np.ndarray:
        """Slots that have all of these flags, ascending."""
        return np.flatnonzero((self.flags[:self.high] & flags) == flags)

    def pin(self, keys: np.ndarray) -> None:
        """Keep the rows of ``keys`` uint64 [n], those that are here, from being evicted."""
        slots = self.lookup(keys)
        self.pin_slots(slots[slots >= 0])

    def pin_slots(self, slots: np.ndarray) -> None:
        """Keep slots from being evicted."""
        self.flags[slots] |= PINNED

    def unpin(self) -> None:
        """Let all rows be evicted again."""
        self.flags[:self.high] &= 255 - PINNED

    def _histogram(self) -> np.ndarray:
        counts = np.zeros(kernels.BINS, np.int64)
        kernels.histogram(self.flags, self.used, self.warmth, self.high, self.now, HALF_LIFE, LIVE,
                          LIVE | PINNED, counts)
        return counts

    def replaceable(self) -> int:
        """How many rows that are not pinned are less warm than one that is used now for the first time."""
        return int(self._histogram()[:kernels.ONCE].sum())

    def coldest(self, n: int) -> np.ndarray:
        """Slots of the ``n`` least warm rows that are not pinned (within a sixteenth of a factor of two),
        ascending in each bin."""
        limit = int(np.searchsorted(np.cumsum(self._histogram()), n))
        out = np.empty(min(n, self.count), np.int64)
        found = kernels.coldest(self.flags, self.used, self.warmth, self.high, self.now, HALF_LIFE, LIVE,
                                LIVE | PINNED, limit, out)
        return out[:found]

    def drop(self, slots: np.ndarray) -> None:
        """Forget rows, whatever their flags."""
        self.index.delete(self.keys[slots])
        self.flags[slots] = 0
        self._free = np.concatenate([self._free, slots])
        self.count -= len(slots)

    def pack(self) -> None:
        """Close the gaps that dropped rows left, when they are many: the list of free slots is part of the budget."""
        if len(self._free) > self.capacity // EVICT_SHARE:
            self._lower(self.count)

    def _lower(self, high: int) -> None:
        """Move the rows of the slots from ``high`` on into free ones below it; memory above is given back."""
        source = np.flatnonzero(self.flags[high:self.high]) + high
        target = np.sort(self._free[self._free < high])[:len(source)]
        kernels.move_slots(self.slab, self.t, self.keys, self.cold, self.flags, self.used, self.warmth,
                           source, target)
        self.index.change(self.keys[target], target)
        self.high = high
        self._free = np.flatnonzero(self.flags[:high] == 0)
        for lazy in self._lazy.values():
            lazy.release(high)

    def resize(self, capacity: int) -> None:
        """Set the capacity, which must hold the rows that are there; memory that is not needed goes back."""
        if capacity < self.count:
            raise ValueError("evict before the host cache shrinks")
        if capacity > self._reserved:
            self._enlarge(capacity)
        self.capacity = capacity
        if self.high > capacity:
            self._lower(capacity)
        if buckets_for(capacity) < self.index.buckets:
            slots = self.slots_where(LIVE)
            self.index.rebuild(self.keys[slots], slots)

    def _enlarge(self, capacity: int) -> None:
        old = {name: lazy.array for name, lazy in self._lazy.items()}
        self._reserve(capacity)
        for name, array in old.items():
            getattr(self, name)[:self.high] = array[:self.high]
        slots = self.slots_where(LIVE)
        self.index.rebuild(self.keys[slots], slots)
