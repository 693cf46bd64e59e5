"""64-bit mixing and hashing: the same numbers on every platform, from arithmetic modulo 2^64 alone.

``mix64`` is the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014): a bijection of 64-bit values in which every input bit moves every output bit.
"""

import numpy as np
from numba import njit

_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE, _S27, _S30, _S31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)


@njit(nogil=True, cache=True)
def mix64(z):
    """The bijective mix of one uint64."""
    z = (z ^ (z >> _S30)) * _MUL1
    z = (z ^ (z >> _S27)) * _MUL2
    return z ^ (z >> _S31)


@njit(nogil=True, cache=True)
def hash_span(buf, lo, hi):
    """Hash, uint64, of the bytes ``buf[lo:hi]`` (uint8 array).

    Words of 8 bytes, low byte first, go through one mix each; the length goes in first, so that a zero byte at the
    end counts. Spans of one length that differ in a single word never collide.
    """
    h = _GOLDEN * (np.uint64(hi - lo) + _ONE)
    at = lo
    while at + 8 <= hi:
        word = np.uint64(buf[at])
        for k in range(1, 8):
            word |= np.uint64(buf[at + k]) << np.uint64(8 * k)
        h = mix64((h ^ word) + _GOLDEN)
        at += 8
    word = np.uint64(0)
    for k in range(hi - at):
        word |= np.uint64(buf[at + k]) << np.uint64(8 * k)
    return mix64((h ^ word) + _GOLDEN)


@njit(nogil=True, cache=True)
def mix_range(start, n):
    """uint64 [n]: ``mix64(start + i)``, distinct values in an order that looks random."""
    out = np.empty(n, np.uint64)
    for i in range(n):
        out[i] = mix64(start + np.uint64(i))
    return out


@njit(nogil=True, cache=True)
def mix_values(values, salt):
    """uint64 [n]: ``mix64(values ^ salt)`` for uint64 values."""
    out = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        out[i] = mix64(values[i] ^ salt)
    return out
