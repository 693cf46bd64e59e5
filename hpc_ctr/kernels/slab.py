"""Kernels of the host cache: records by slot, how warm a slot is, and which slots to evict.

The warmth of a slot is a count of the passes that used it, which halves every ``half_life`` passes (Lee et
al., "LRFU", IEEE Trans. Computers 2001): a short half-life is LRU, a long one LFU. It is kept as the value at
the last use.
"""

import math

import numpy as np
from numba import njit

BINS = 1024
_OCTAVE = 16        # bins for a factor of two of warmth; warmth 1 is in the middle bin
ONCE = BINS // 2    # the bin of a slot that was used once, just now


@njit(nogil=True, cache=True)
def gather(slab, slab_t, slots, targets, records, t):
    """Copy slots to rows ``targets`` of ``records`` uint32 [*, W] and ``t``; slots < 0 are left out."""
    words = records.shape[1]
    for i in range(len(slots)):
        s = slots[i]
        if s < 0:
            continue
        target = targets[i]
        t[target] = slab_t[s]
        for w in range(words):
            records[target, w] = slab[s, w]


@njit(nogil=True, cache=True)
def scatter(slab, slab_t, slots, sources, records, t):
    """Copy rows ``sources`` of ``records`` uint32 [*, W] and ``t`` into slots; slots < 0 are left out."""
    words = records.shape[1]
    for i in range(len(slots)):
        s = slots[i]
        if s < 0:
            continue
        source = sources[i]
        slab_t[s] = t[source]
        for w in range(words):
            slab[s, w] = records[source, w]


@njit(nogil=True, cache=True)
def move_slots(slab, slab_t, keys, cold, flags, used, warmth, source, target):
    """Move whole slots ``source[i]`` to ``target[i]``; no slot may be in both lists."""
    for i in range(len(source)):
        a, b = source[i], target[i]
        slab[b] = slab[a]
        slab_t[b] = slab_t[a]
        keys[b] = keys[a]
        cold[b] = cold[a]
        flags[b] = flags[a]
        used[b] = used[a]
        warmth[b] = warmth[a]
        flags[a] = 0


@njit(nogil=True, cache=True)
def warm(used, warmth, slots, now, half_life):
    """Count one use of each slot >= 0 in pass ``now``; further uses in the same pass do not count."""
    for i in range(len(slots)):
        s = slots[i]
        if s >= 0 and np.int64(used[s]) != now:
            warmth[s] = np.float32(1.0 + warmth[s] * 2.0 ** (-(now - np.int64(used[s])) / half_life))
            used[s] = np.uint32(now)


@njit(nogil=True, cache=True, inline="always")
def _bin(warmth, used, now, half_life):
    octaves = math.log2(max(np.float64(warmth), 1e-30)) - (now - np.int64(used)) / half_life
    return min(max(np.int64(math.floor(octaves * _OCTAVE)) + ONCE, 0), BINS - 1)


@njit(nogil=True, cache=True)
def histogram(flags, used, warmth, high, now, half_life, live, mask, counts):
    """Add up slots below ``high`` by the bin of their warmth now, into ``counts`` int64 [BINS]: those whose flags in
    ``mask`` are ``live``."""
    for s in range(high):
        if (flags[s] & mask) == live:
            counts[_bin(warmth[s], used[s], now, half_life)] += 1


@njit(nogil=True, cache=True)
def coldest(flags, used, warmth, high, now, half_life, live, mask, limit, out):
    """The slots of the bins below ``limit``, then as many of bin ``limit`` as still fit into ``out``; their
    number."""
    n = 0
    for s in range(high):
        if n < len(out) and (flags[s] & mask) == live and _bin(warmth[s], used[s], now, half_life) < limit:
            out[n] = s
            n += 1
    for s in range(high):
        if n == len(out):
            break
        if (flags[s] & mask) == live and _bin(warmth[s], used[s], now, half_life) == limit:
            out[n] = s
            n += 1
    return n
