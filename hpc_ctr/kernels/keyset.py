"""A growing set of keys that only counts: how many distinct keys has a pass so far?"""

import numpy as np
from numba import njit

_JIT = dict(nogil=True, cache=True, boundscheck=False)


class KeySet:
    """Distinct uint64 keys, open addressing on the key's low bits (the high bits are the shard)."""

    def __init__(self) -> None:
        self._slots = np.zeros(1024, np.uint64)
        self._count = 0
        self._has_zero = False

    def __len__(self) -> int:
        return self._count + self._has_zero

    def add(self, keys: np.ndarray) -> int:
        """Add keys uint64 [n]; returns how many of them were not in the set."""
        before = len(self)
        need = 2 * (self._count + len(keys))
        if need > len(self._slots):
            grown = np.zeros(1 << int(need).bit_length(), np.uint64)
            _insert(grown, self._slots)
            self._slots = grown
        new, zero = _insert(self._slots, keys)
        self._count += new
        self._has_zero = self._has_zero or zero
        return len(self) - before


@njit(**_JIT)
def _insert(slots, keys):
    """Insert non-zero keys into slots uint64 [power of two], 0 = free. Returns (inserted, whether a 0 was met)."""
    mask = np.uint64(len(slots) - 1)
    inserted = 0
    zero = False
    for i in range(len(keys)):
        key = keys[i]
        if key == 0:
            zero = True
            continue
        at = key & mask
        while slots[at] != 0 and slots[at] != key:
            at = (at + np.uint64(1)) & mask
        if slots[at] == 0:
            slots[at] = key
            inserted += 1
    return inserted, zero
