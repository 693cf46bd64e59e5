"""The cold tier's index in memory: key to location, at most 10 bytes a row.

It does not hold keys. Several entries may match a key, and an entry may match a key that is not stored: the
caller reads the record at each location and compares. An entry is named exactly by (key, location).
"""

import threading

import numpy as np

from hpc_ctr.kernels import cold_index as kernels
from hpc_ctr.kernels.cold_index import ENTRY_BYTES, GROUPS

ROW_BYTES = 10
LAST_LOCATION = 2**40 - 1
_MAX_LOAD = 0.96
_NEW_LOAD = 0.905       # 9 / 0.905 < 10 bytes a row in a group that has just grown
_FIXED_BYTES = GROUPS * (3 * 8 + 2 * ENTRY_BYTES)


def bytes_for(rows: int) -> int:
    """Upper bound of the bytes of an index of so many rows."""
    return ROW_BYTES * rows + _FIXED_BYTES


class ColdIndex:
    """Entries (key, location) in 256 groups that grow one at a time, so that growth needs no second copy.

    One thread changes it. Another one may call ``has`` meanwhile, and hold ``lock`` to see several answers of one state.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self._blocks = [np.empty(0, np.uint8)] * GROUPS
        self._addresses = np.zeros(GROUPS, np.uint64)
        self._sizes = np.zeros(GROUPS, np.int64)
        self._counts = np.zeros(GROUPS, np.int64)

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all groups and of the arrays that describe them."""
        return int(self._sizes.sum()) * ENTRY_BYTES + GROUPS * 3 * 8

    def find(self, keys: np.ndarray, skip: np.ndarray) -> np.ndarray:
        """Location int64 [n] of the entry number ``skip[i]`` that may be that of ``keys[i]``; -1: no more."""
        out = np.empty(len(keys), np.int64)
        kernels.find(self._addresses, self._sizes, keys, skip, out)
        return out

    def find_alone(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Location int64 [n] of the first entry that may be that of each key (-1: none), and whether it is the only
        one, bool [n]."""
        out, alone = np.empty(len(keys), np.int64), np.empty(len(keys), np.bool_)
        kernels.find_alone(self._addresses, self._sizes, keys, out, alone)
        return out, alone

    def has(self, keys: np.ndarray, locations: np.ndarray) -> np.ndarray:
        """Whether the entries (key, location) exist, bool [n]."""
        out = np.empty(len(keys), np.bool_)
        with self.lock:
            kernels.has(self._addresses, self._sizes, keys, locations, out)
        return out

    def move(self, keys: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
        """Change the location of existing entries; where ``old`` is negative nothing is done."""
        with self.lock:
            lost = kernels.move(self._addresses, self._sizes, keys, old, new)
        if lost:
            raise KeyError("an entry that was to move is not in the cold index")

    def move_present(self, keys: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """As ``move``, passing over entries that do not exist; returns which do, bool [n]."""
        moved = np.empty(len(keys), np.bool_)
        with self.lock:
            kernels.move_present(self._addresses, self._sizes, keys, old, new, moved)
        return moved

    def add(self, keys: np.ndarray, locations: np.ndarray, wanted: np.ndarray | None = None) -> None:
        """Add entries for keys that are not stored yet (those where ``wanted``)."""
        wanted = np.ones(len(keys), np.bool_) if wanted is None else wanted
        self.reserve(keys[wanted])
        with self.lock:
            kernels.add(self._addresses, self._sizes, self._counts, keys, locations, wanted)

    def remove(self, keys: np.ndarray, locations: np.ndarray) -> int:
        """Remove entries; returns how many were there."""
        with self.lock:
            return int(kernels.remove(self._addresses, self._sizes, self._counts, keys, locations))

    def reserve(self, keys: np.ndarray) -> None:
        """Make room for these keys, none of which is stored yet."""
        needed = self._counts.copy()
        kernels.group_counts(keys, needed)
        for group in np.flatnonzero(needed > (self._sizes * _MAX_LOAD).astype(np.int64)):
            self._grow(int(group), int(needed[group]))

    def expect(self, rows: int) -> None:
        """Size the groups of an empty index for about so many rows, to spare it growing step by step."""
        # a little below the mean: a group that ends up smaller than others must not waste what they need
        for group in range(GROUPS):
            if share := int(rows / GROUPS * 0.94):
                self._grow(group, share)

    def trim(self) -> None:
        """Give back what ``expect`` took too much."""
        for group in range(GROUPS):
            if self._sizes[group] > int(self._counts[group] / _NEW_LOAD) + 2:
                self._grow(group, int(self._counts[group]))

    def _grow(self, group: int, needed: int) -> None:
        size = int(needed / _NEW_LOAD) + 2
        block = np.empty(size * ENTRY_BYTES, np.uint8)
        with self.lock:
            kernels.regrow(self._addresses[group], self._sizes[group], np.uint64(block.ctypes.data), size)
            self._blocks[group] = block
            self._addresses[group], self._sizes[group] = block.ctypes.data, size
