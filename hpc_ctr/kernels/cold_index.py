"""Kernels of the cold tier's index: per group a table of (32-bit fingerprint, 40-bit location), 9 bytes an
entry.

A key is mixed into 64 bits: the top 8 choose one of 256 groups, the next 32 are the fingerprint. A group's
table is one block of bytes, found by its address: fingerprints uint32 [size], low location words uint32
[size], high location bytes uint8 [size]. Home of an entry is ``fingerprint * size >> 32``; Robin Hood order
(an entry is never nearer to its home than the one it displaced) keeps searches short at 96 % load. Home
follows from the fingerprint, so a group grows without its keys. Several entries may have the same
fingerprint: the record at the location decides.
"""

import numpy as np
from numba import carray, njit

from hpc_ctr.kernels.memory import pointer, prefetch

GROUPS = 256
ENTRY_BYTES = 9
EMPTY = np.uint32(0xFFFFFFFF)
_AHEAD = 8


@njit(nogil=True, cache=True, inline="always")
def _split(key):
    """Group and fingerprint of a key."""
    x = np.uint64(key) ^ (np.uint64(key) >> np.uint64(32))
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    fingerprint = np.uint32((x >> np.uint64(24)) & np.uint64(0xFFFFFFFF))
    if fingerprint == EMPTY:
        fingerprint = np.uint32(0xFFFFFFFE)
    return np.int64(x >> np.uint64(56)), fingerprint


@njit(nogil=True, cache=True, inline="always")
def _home(fingerprint, size):
    return np.int64((np.uint64(fingerprint) * np.uint64(size)) >> np.uint64(32))


@njit(nogil=True, cache=True, inline="always")
def _prefetch(addresses, sizes, key):
    """Ask for the three cache lines at the home of a key's entry: it is rarely much further on."""
    group, fingerprint = _split(key)
    address, size = addresses[group], sizes[group]
    home = _home(fingerprint, size)
    prefetch(address + np.uint64(4 * home))
    prefetch(address + np.uint64(4 * (size + home)))
    prefetch(address + np.uint64(8 * size + home))


@njit(nogil=True, cache=True, inline="always")
def _block(address, size):
    prints = carray(pointer(address), size, np.uint32)
    low = carray(pointer(address + np.uint64(4 * size)), size, np.uint32)
    high = carray(pointer(address + np.uint64(8 * size)), size, np.uint8)
    return prints, low, high


@njit(nogil=True, cache=True, inline="always")
def _distance(position, fingerprint, size):
    d = position - _home(fingerprint, size)
    return d if d >= 0 else d + size


@njit(nogil=True, cache=True)
def same_print(keys, key):
    """Which of ``keys`` have the group and fingerprint of ``key``, bool [n]."""
    group, fingerprint = _split(key)
    out = np.empty(len(keys), np.bool_)
    for i in range(len(keys)):
        other_group, other = _split(keys[i])
        out[i] = other_group == group and other == fingerprint
    return out


@njit(nogil=True, cache=True)
def group_counts(keys, counts):
    """Add to ``counts`` int64 [GROUPS] how many of the keys belong to each group."""
    for i in range(len(keys)):
        group, _ = _split(keys[i])
        counts[group] += 1


@njit(nogil=True, cache=True, inline="always")
def _seek(prints, size, fingerprint, b, distance):
    """From bucket ``b``, ``distance`` from the fingerprint's home, to the next entry that has it: its bucket and
    distance, or -1 and nothing."""
    while prints[b] != EMPTY and _distance(b, prints[b], size) >= distance:
        if prints[b] == fingerprint:
            return b, distance
        b = b + 1 if b + 1 < size else 0
        distance += 1
    return -1, distance


@njit(nogil=True, cache=True, inline="always")
def _after(b, size):
    return b + 1 if b + 1 < size else 0


@njit(nogil=True, cache=True, inline="always")
def _location(low, high, b):
    return (np.int64(high[b]) << 32) | np.int64(low[b])


@njit(nogil=True, cache=True)
def find(addresses, sizes, keys, skip, out):
    """``out[i]`` = location of entry number ``skip[i]`` among those with the fingerprint of ``keys[i]``, or
    -1."""
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch(addresses, sizes, keys[i + _AHEAD])
        group, fingerprint = _split(keys[i])
        size = sizes[group]
        out[i] = -1
        if size == 0:
            continue
        prints, low, high = _block(addresses[group], size)
        b, distance = _seek(prints, size, fingerprint, _home(fingerprint, size), 0)
        for _ in range(skip[i]):
            if b < 0:
                break
            b, distance = _seek(prints, size, fingerprint, _after(b, size), distance + 1)
        if b >= 0:
            out[i] = _location(low, high, b)


@njit(nogil=True, cache=True)
def find_alone(addresses, sizes, keys, out, alone):
    """``out[i]`` = location of the first entry with the fingerprint of ``keys[i]``, or -1; ``alone[i]`` = whether it is
    the only one."""
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch(addresses, sizes, keys[i + _AHEAD])
        group, fingerprint = _split(keys[i])
        size = sizes[group]
        out[i], alone[i] = -1, False
        if size == 0:
            continue
        prints, low, high = _block(addresses[group], size)
        b, distance = _seek(prints, size, fingerprint, _home(fingerprint, size), 0)
        if b >= 0:
            out[i] = _location(low, high, b)
            alone[i] = _seek(prints, size, fingerprint, _after(b, size), distance + 1)[0] < 0


@njit(nogil=True, cache=True)
def _find_exact(prints, low, high, size, fingerprint, location):
    b, distance = _seek(prints, size, fingerprint, _home(fingerprint, size), 0)
    while b >= 0 and _location(low, high, b) != location:
        b, distance = _seek(prints, size, fingerprint, _after(b, size), distance + 1)
    return b


@njit(nogil=True, cache=True)
def has(addresses, sizes, keys, locations, out):
    """``out[i]`` = whether the index holds exactly this location for ``keys[i]``."""
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch(addresses, sizes, keys[i + _AHEAD])
        group, fingerprint = _split(keys[i])
        size = sizes[group]
        out[i] = False
        if size > 0:
            prints, low, high = _block(addresses[group], size)
            out[i] = _find_exact(prints, low, high, size, fingerprint, locations[i]) >= 0


@njit(nogil=True, cache=True)
def move(addresses, sizes, keys, old, new):
    """Give the entry (``keys[i]``, ``old[i]``) the location ``new[i]``; where ``old[i]`` < 0 nothing is done.

    Returns the number of entries that were not found.
    """
    lost = 0
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch(addresses, sizes, keys[i + _AHEAD])
        if old[i] < 0:
            continue
        group, fingerprint = _split(keys[i])
        size = sizes[group]
        b = -1
        if size > 0:
            prints, low, high = _block(addresses[group], size)
            b = _find_exact(prints, low, high, size, fingerprint, old[i])
        if b < 0:
            lost += 1
        else:
            low[b] = np.uint32(new[i] & 0xFFFFFFFF)
            high[b] = np.uint8(new[i] >> 32)
    return lost


@njit(nogil=True, cache=True)
def move_present(addresses, sizes, keys, old, new, moved):
    """Give the entry (``keys[i]``, ``old[i]``) the location ``new[i]`` where there is one; ``moved[i]`` = whether."""
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch(addresses, sizes, keys[i + _AHEAD])
        group, fingerprint = _split(keys[i])
        size = sizes[group]
        moved[i] = False
        if size == 0:
            continue
        prints, low, high = _block(addresses[group], size)
        b = _find_exact(prints, low, high, size, fingerprint, old[i])
        if b >= 0:
            low[b] = np.uint32(new[i] & 0xFFFFFFFF)
            high[b] = np.uint8(new[i] >> 32)
            moved[i] = True


@njit(nogil=True, cache=True)
def _put(prints, low, high, size, fingerprint, low_word, high_byte):
    b = _home(fingerprint, size)
    distance = 0
    while prints[b] != EMPTY:
        resident = _distance(b, prints[b], size)
        if resident < distance:
            fingerprint, prints[b] = prints[b], fingerprint
            low_word, low[b] = low[b], low_word
            high_byte, high[b] = high[b], high_byte
            distance = resident
        b = b + 1 if b + 1 < size else 0
        distance += 1
    prints[b] = fingerprint
    low[b] = low_word
    high[b] = high_byte


@njit(nogil=True, cache=True)
def add(addresses, sizes, counts, keys, locations, wanted):
    """Add an entry for each key where ``wanted``, whatever is there already. Room has been made before."""
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            group, fingerprint = _split(keys[i + _AHEAD])
            size = np.uint64(sizes[group])
            home = np.uint64(_home(fingerprint, sizes[group]))
            for address in (np.uint64(4) * home, np.uint64(4) * (size + home), np.uint64(8) * size + home):
                prefetch(addresses[group] + address)
        if not wanted[i]:
            continue
        group, fingerprint = _split(keys[i])
        size = sizes[group]
        prints, low, high = _block(addresses[group], size)
        low_word, high_byte = np.uint32(locations[i] & 0xFFFFFFFF), np.uint8(locations[i] >> 32)
        _put(prints, low, high, size, fingerprint, low_word, high_byte)
        counts[group] += 1


@njit(nogil=True, cache=True)
def remove(addresses, sizes, counts, keys, locations):
    """Remove the entries (``keys[i]``, ``locations[i]``), shifting followers back; returns how many were
    there."""
    removed = 0
    n = len(keys)
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch(addresses, sizes, keys[i + _AHEAD])
        group, fingerprint = _split(keys[i])
        size = sizes[group]
        if size == 0:
            continue
        prints, low, high = _block(addresses[group], size)
        b = _find_exact(prints, low, high, size, fingerprint, locations[i])
        if b < 0:
            continue
        after = b + 1 if b + 1 < size else 0
        while prints[after] != EMPTY and _distance(after, prints[after], size) > 0:
            prints[b] = prints[after]
            low[b] = low[after]
            high[b] = high[after]
            b = after
            after = b + 1 if b + 1 < size else 0
        prints[b] = EMPTY
        counts[group] -= 1
        removed += 1
    return removed


@njit(nogil=True, cache=True)
def regrow(old_address, old_size, new_address, new_size):
    """Copy a group's entries into a new, larger block, whose memory need not be initialised."""
    prints, low, high = _block(new_address, new_size)
    for b in range(new_size):
        prints[b] = EMPTY
    if old_size > 0:
        old_prints, old_low, old_high = _block(old_address, old_size)
        for b in range(old_size):
            if old_prints[b] != EMPTY:
                _put(prints, low, high, new_size, old_prints[b], old_low[b], old_high[b])
