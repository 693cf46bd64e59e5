"""Merging the copies of shared rows: loops over rows, copies of a row side by side in rank order."""

import math

import numpy as np
from numba import njit

_JIT = dict(nogil=True, cache=True, boundscheck=False)

MASS, MEAN, MEAN_ALL, SUM = 0, 1, 2, 3
RULES = {"mass": MASS, "mean": MEAN, "mean_all": MEAN_ALL, "sum": SUM}


@njit(**_JIT)
def effective_steps(touches, window, rule):
    """(U, weight of the summed change) for copies with ``touches`` steps each in a window of ``window`` steps.

    mass: A copies' steps on distinct samples count once each, but steps that fell on the same moments as those of
    another copy count as one: U = min(A, max(max a, W*(1-prod(1-a/W)))), weight U/A. The other rules exist for
    comparison: mean over touchers, sum of changes; mean_all divides by the number of replicas (done by the caller).
    """
    total = 0.0
    largest = 0.0
    miss = 1.0
    for i in range(len(touches)):
        a = float(touches[i])
        total += a
        largest = max(largest, a)
        miss *= 1.0 - a / window
    if rule == MASS:
        union = min(total, max(largest, window * (1.0 - miss)))
        return union, union / total
    if rule == SUM:
        return total, 1.0
    return total / len(touches), 1.0 / len(touches)


@njit(**_JIT)
def merge_rows(starts, copies, copies_t, ref, ref_t, window, rule, replicas, optimizer, width, beta1, beta2,
               out, out_t):
    """Merge every row from the copies of the replicas that stepped on it since the last merge.

    Row i has the copies [starts[i], starts[i+1]) of ``copies`` [c, floats], in rank order, with step counts
    copies_t uint32 [c]; ref [n, floats] and ref_t uint32 [n] are the state at the last merge; window W is the number
    of steps since then. optimizer: 0 adam, 1 rowwise_adagrad. out [n, floats] and out_t uint32 [n] take the result.
    A row with one copy is taken as it is. Exact rule: docs/architecture.md, "Merging rows".
    """
    floats = ref.shape[1]
    for i in range(len(starts) - 1):
        begin = starts[i]
        end = starts[i + 1]
        n = end - begin
        if n == 0:
            for j in range(floats):
                out[i, j] = ref[i, j]
            out_t[i] = ref_t[i]
            continue
        if n == 1 and rule != MEAN_ALL:
            for j in range(floats):
                out[i, j] = copies[begin, j]
            out_t[i] = copies_t[begin]
            continue
        touches = np.empty(n, np.float64)
        for c in range(n):
            touches[c] = float(copies_t[begin + c] - ref_t[i])
        union, weight = effective_steps(touches, window, rule)
        if rule == MEAN_ALL:
            weight = 1.0 / replicas
            union = union * n / replicas
        steps = math.floor(union + 0.5 + 1e-9)  # halves go up, whatever rounding noise says
        out_t[i] = ref_t[i] + np.uint32(steps)
        for j in range(width):
            change = 0.0
            for c in range(begin, end):
                change += copies[c, j] - ref[i, j]
            out[i, j] = ref[i, j] + weight * change
        if optimizer == 0:
            _merge_moments(begin, end, touches, steps, copies, ref, i, width, 2 * width, beta1, False, out)
            _merge_moments(begin, end, touches, steps, copies, ref, i, 2 * width, 3 * width, beta2, True, out)
        else:
            for j in range(width, floats):
                change = 0.0
                for c in range(begin, end):
                    change += copies[c, j] - ref[i, j]
                out[i, j] = ref[i, j] + weight * change


@njit(**_JIT)
def _merge_moments(begin, end, touches, steps, copies, ref, row, first, last, beta, clip, out):
    """Decayed start plus the mean gradient statistic of the copies, as ``steps`` steps would have left it."""
    mass = 0.0
    for c in range(end - begin):
        mass += 1.0 - beta ** touches[c]
    keep = beta ** float(steps)
    for j in range(first, last):
        gained = 0.0
        for c in range(begin, end):
            term = copies[c, j] - beta ** touches[c - begin] * ref[row, j]
            gained += max(term, 0.0) if clip else term
        out[row, j] = keep * ref[row, j] + (1.0 - keep) * gained / mass
