"""Checksums of stored rows and files. Their values are part of the file format: never change them.

A row's check is a 32-bit hash over the words of key, t and payload, in four lanes. Every step is a bijection
of its lane for a given word and of the word for a given lane, so a change inside one 32-bit word always
changes the check.
"""

import numpy as np
from numba import njit

_SEED = np.uint32(0x9747B28C)
_M1 = np.uint32(0xCC9E2D51)
_M2 = np.uint32(0x1B873593)
_M3 = np.uint32(0x85EBCA6B)
_M4 = np.uint32(0xC2B2AE35)
_WIDE = np.uint64(0x9FB21C651E98DF25)
_START = np.uint64(0x243F6A8885A308D3)


@njit(nogil=True, cache=True, inline="always")
def _rotate(value, bits):
    return np.uint32((value << np.uint32(bits)) | (value >> np.uint32(32 - bits)))


@njit(nogil=True, cache=True, inline="always")
def _step(lane, word):
    return np.uint32(_rotate(np.uint32(lane ^ np.uint32(word * _M1)), 13) * _M2)


@njit(nogil=True, cache=True)
def row_check(row):
    """Check of one stored row, uint32 [4 + payload words]: key low, key high, check (left out), t,
    payload."""
    a = _step(_SEED, row[0])
    b = _step(np.uint32(_SEED + _M1), row[1])
    c = _step(np.uint32(_SEED + _M2), row[3])
    d = np.uint32(_SEED + _M3 + np.uint32(len(row)))
    n = len(row)
    i = 4
    while i + 4 <= n:
        a = _step(a, row[i])
        b = _step(b, row[i + 1])
        c = _step(c, row[i + 2])
        d = _step(d, row[i + 3])
        i += 4
    while i < n:
        a = _step(a, row[i])
        i += 1
    h = np.uint32(_rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18))
    h = np.uint32((h ^ (h >> np.uint32(16))) * _M3)
    h = np.uint32((h ^ (h >> np.uint32(13))) * _M4)
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit(nogil=True, cache=True)
def first_bad_row(rows):
    """Number of the first row of uint32 [n, 4 + words] whose check (word 2) is wrong, or -1."""
    for i in range(len(rows)):
        if row_check(rows[i]) != rows[i, 2]:
            return i
    return -1


@njit(nogil=True, cache=True)
def fold_checks(state, rows):
    """Carry a 64-bit digest over the checks (word 2) of rows, in their order; start from ``new_digest()``."""
    for i in range(len(rows)):
        state = (state ^ np.uint64(rows[i, 2])) * _WIDE
        state ^= state >> np.uint64(29)
    return state


@njit(nogil=True, cache=True)
def fold_bytes(state, data):
    """Carry a 64-bit digest over bytes, uint8 [n]."""
    for i in range(len(data)):
        state = (state ^ np.uint64(data[i])) * _WIDE
        state ^= state >> np.uint64(29)
    return state


def new_digest() -> np.uint64:
    """The state in which a digest starts."""
    return _START
