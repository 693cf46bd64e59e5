"""Counting shows: of the keys of a pass exactly, and of all keys without a row in a fixed number of counters.

The counters are a count-min sketch (Cormode and Muthukrishnan, J. Algorithms 2005): a key adds to one counter in each
of ROWS lines, and the smallest of them is never below the key's shows. Counters saturate, and saturating sums do not
depend on their order.
"""

import numpy as np
from numba import njit

from hpc_ctr.kernels.hashing import mix64

_JIT = dict(nogil=True, cache=True, boundscheck=False)

ROWS = 4
MOST = 255


@njit(**_JIT)
def tally(at, inverse, offsets, label, shows, clicks, field):
    """Add one batch to the counts of a pass's keys.

    Key occurrence i is that of key number ``at[inverse[i]]``; bag (f, b) is [offsets[f*B + b], offsets[f*B + b + 1]).
    shows and clicks int64 [n] grow by 1 for each occurrence, and for each in a sample whose label is above one half;
    field int64 [n] becomes f.
    """
    size = len(label)
    for bag in range(len(offsets) - 1):
        click = 1 if label[bag % size] > 0.5 else 0
        for i in range(offsets[bag], offsets[bag + 1]):
            key = at[inverse[i]]
            shows[key] += 1
            clicks[key] += click
            field[key] = bag // size


@njit(**_JIT)
def _place(hashed, line, width):
    """Counter of a line, from one hash of the key: two halves give as many places as there are lines."""
    low = hashed & np.uint64(0xFFFFFFFF)
    high = (hashed >> np.uint64(32)) | np.uint64(1)
    return np.int64((((low + np.uint64(line) * high) & np.uint64(0xFFFFFFFF)) * np.uint64(width)) >> np.uint64(32))


@njit(**_JIT)
def estimate(counters, shift, first, keys, out):
    """``out[i]`` uint8 = the count of ``keys[i]``, or more. counters uint8 [shards, ROWS, width]; a key's shard is its
    top bits, ``key >> shift``, less ``first``."""
    width = counters.shape[2]
    for i in range(len(keys)):
        shard = np.int64(keys[i] >> shift) - first
        hashed = mix64(keys[i])
        least = MOST
        for line in range(ROWS):
            least = min(least, counters[shard, line, _place(hashed, line, width)])
        out[i] = least


@njit(**_JIT)
def count(counters, shift, first, keys, amounts):
    """Add ``amounts`` int64 [n] to the counters of ``keys``, up to MOST."""
    width = counters.shape[2]
    for i in range(len(keys)):
        shard = np.int64(keys[i] >> shift) - first
        hashed = mix64(keys[i])
        for line in range(ROWS):
            place = _place(hashed, line, width)
            counters[shard, line, place] = min(MOST, counters[shard, line, place] + amounts[i])


@njit(**_JIT)
def commit(counters, pending):
    """Add ``pending`` to ``counters``, up to MOST, and clear it; both uint8, flat."""
    for i in range(len(counters)):
        counters[i] = min(MOST, np.int64(counters[i]) + np.int64(pending[i]))
        pending[i] = 0
