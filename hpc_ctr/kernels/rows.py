"""Kernels between arrays and the rows of segment files.

A stored row is uint32 [4 + W]: key low, key high, check, t, then the record's W 32-bit words. Records in
memory are seen as uint32 as well, so that one kernel serves float32 and float64 and copies the bits as they
are.
"""

import numpy as np
from numba import carray, njit

from hpc_ctr.kernels.checksum import row_check
from hpc_ctr.kernels.memory import pointer, prefetch

_AHEAD = 4


@njit(nogil=True, cache=True, inline="always")
def _key(row):
    return np.uint64(row[0]) | (np.uint64(row[1]) << np.uint64(32))


@njit(nogil=True, cache=True)
def pack_rows(out, keys, t, positions, first, second):
    """Fill stored rows ``out`` uint32 [n, 4 + W].

    Row i takes its record from ``first[positions[i]]``, or, where the position p is negative, from
    ``second[-1 - p]`` (both uint32 [*, >= W]).
    """
    words = out.shape[1] - 4
    for i in range(len(out)):
        out[i, 0] = np.uint32(keys[i] & np.uint64(0xFFFFFFFF))
        out[i, 1] = np.uint32(keys[i] >> np.uint64(32))
        out[i, 3] = t[i]
        p = positions[i]
        if p >= 0:
            for w in range(words):
                out[i, 4 + w] = first[p, w]
        else:
            for w in range(words):
                out[i, 4 + w] = second[-1 - p, w]
        out[i, 2] = row_check(out[i])


@njit(nogil=True, cache=True)
def unpack_rows(rows, keys, records, t):
    """Split stored rows into ``keys`` uint64 [n], ``records`` uint32 [n, >= W] and ``t`` uint32 [n]."""
    words = rows.shape[1] - 4
    for i in range(len(rows)):
        keys[i] = _key(rows[i])
        t[i] = rows[i, 3]
        for w in range(words):
            records[i, w] = rows[i, 4 + w]


@njit(nogil=True, cache=True)
def copy_rows(sources, out):
    """``out[i]``, uint32 [n, w] and C-contiguous, = the w words at address ``sources[i]``, uint64 [n]."""
    n, words = out.shape
    for i in range(n):
        if i + _AHEAD < n:
            ahead = sources[i + _AHEAD]
            for line in range(0, 4 * words, 64):
                prefetch(ahead + np.uint64(line))
        row = carray(pointer(sources[i]), words, np.uint32)
        for j in range(words):
            out[i, j] = row[j]


@njit(nogil=True, cache=True)
def row_keys(rows, keys):
    """Keys of stored rows; returns the first row whose key is not above the one before it, or -1."""
    disorder = -1
    for i in range(len(rows)):
        keys[i] = _key(rows[i])
        if disorder < 0 and i > 0 and keys[i] <= keys[i - 1]:
            disorder = i
    return disorder


@njit(nogil=True, cache=True)
def plan_reads(locations, bases, offsets, row_bytes, gap, longest, run_segment, run_offset, run_bytes,
               run_first):
    """Turn ascending locations into reads that run through neighbours and gaps of up to ``gap`` bytes.

    ``bases``: location of each segment's first row, ascending; ``offsets``: where its rows begin in its file.
    A read is at most ``longest`` bytes (at least one row). Returns the number of runs; ``run_first[r]`` is
    the first of the locations that run r serves, and ``run_first[runs]`` closes the last.
    """
    runs = 0
    segment = 0
    end = np.int64(-1)
    for i in range(len(locations)):
        changed = False
        while segment + 1 < len(bases) and locations[i] >= bases[segment + 1]:
            segment += 1
            changed = True
        begin = offsets[segment] + (locations[i] - bases[segment]) * row_bytes
        if (i > 0 and not changed and begin - end <= gap
                and begin + row_bytes - run_offset[runs - 1] <= longest):
            end = max(end, begin + row_bytes)
            run_bytes[runs - 1] = end - run_offset[runs - 1]
            continue
        run_segment[runs] = segment
        run_offset[runs] = begin
        run_bytes[runs] = row_bytes
        run_first[runs] = i
        end = begin + row_bytes
        runs += 1
    run_first[runs] = len(locations)
    return runs


@njit(nogil=True, cache=True)
def take_rows(buffer, words, starts, first_run, last_run, run_segment, run_offset, run_first, bases, offsets,
              locations, places, keys, targets, records, t, copy, found):
    """Serve the locations of runs ``first_run`` to ``last_run - 1`` from what was read.

    ``buffer``: uint32 words, run r beginning at word ``starts[r - first_run]``; ``words`` = 4 + W. Location i
    is meant for key ``keys[places[i]]``; where the stored key is that one, ``found[places[i]]`` is set and,
    if ``copy``, record and t go to row ``targets[places[i]]`` of ``records`` uint32 [*, >= W] and ``t``
    uint32. Returns the first i whose row fails its check, or -1.
    """
    for r in range(first_run, last_run):
        segment = run_segment[r]
        for i in range(run_first[r], run_first[r + 1]):
            begin = offsets[segment] + (locations[i] - bases[segment]) * words * 4
            at = starts[r - first_run] + (begin - run_offset[r]) // 4
            row = buffer[at:at + words]
            if row_check(row) != row[2]:
                return i
            place = places[i]
            if _key(row) != keys[place]:
                continue
            found[place] = True
            if copy:
                target = targets[place]
                t[target] = row[3]
                for w in range(words - 4):
                    records[target, w] = row[4 + w]
    return -1
