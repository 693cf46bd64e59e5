"""One pass over stored rows that are read from front to back: checks, order, digest and keys together."""

import numpy as np
from numba import njit

from hpc_ctr.kernels.checksum import fold_checks, row_check


@njit(nogil=True, cache=True)
def scan_rows(rows, keys, first, previous, state):
    """Check stored rows uint32 [n, 4 + W] and fill ``keys`` uint64 [n].

    ``previous`` is the key before row 0, unless row 0 is the ``first`` of its file. Returns (first row whose check is
    wrong or -1, first row whose key is not above the one before it or -1, ``state`` carried on by ``fold_checks``).
    """
    disorder = -1
    for i in range(len(rows)):
        row = rows[i]
        if row_check(row) != row[2]:
            return i, disorder, state
        keys[i] = np.uint64(row[0]) | (np.uint64(row[1]) << np.uint64(32))
        if disorder < 0 and not (first and i == 0) and keys[i] <= previous:
            disorder = i
        previous = keys[i]
    return -1, disorder, fold_checks(state, rows)
