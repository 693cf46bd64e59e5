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
    count = 0
    for i in range(len(touches)):
        a = float(touches[i])
        count += a > 0
        total += a
        largest = max(largest, a)
        miss *= 1.0 - a / window
    if rule == MASS:
        union = min(total, max(largest, window * (1.0 - miss)))
        return union, union / total
    if rule == SUM:
        return total, 1.0
    return total / count, 1.0 / count


@njit(**_JIT)
def merge_x(starts, copies, touches, ref, window, rule, replicas, width, out):
    """Merge x of every row from the copies of the replicas that stepped on it since the last merge.

    Row i has the copies [starts[i], starts[i+1]) of ``copies`` [c, >= width], in rank order, with touches float64 [c]
    steps each (0: a copy that does not count); ref [n, >= width] is the row at the last merge, window W the number of
    steps since then. ``out`` [n, >= width] takes x and nothing else. What one copy alone stepped on is taken as it is.
    Exact rule: docs/architecture.md, "Merging rows".
    """
    for i in range(len(starts) - 1):
        begin, end = starts[i], starts[i + 1]
        count, only = _touchers(touches, begin, end)
        for j in range(width):
            out[i, j] = ref[i, j]
        if count == 0:
            continue
        if count == 1 and rule != MEAN_ALL:
            for j in range(width):
                out[i, j] = copies[only, j]
            continue
        weight = effective_steps(touches[begin:end], window, rule)[1]
        if rule == MEAN_ALL:
            weight = 1.0 / replicas
        for j in range(width):
            out[i, j] = ref[i, j] + weight * _change(begin, end, touches, copies, ref, i, j)


@njit(**_JIT)
def merge_state(starts, copies, touches, ref, ref_t, window, rule, replicas, optimizer, width, beta1, beta2, out, out_t):
    """Merge the optimizer state, columns [width, floats), and the step count of every row; arguments as merge_x.

    copies, ref and out are whole records [.., floats]; ref_t uint32 [n] belongs to ref. optimizer: 0 adam,
    1 rowwise_adagrad. out_t uint32 [n] takes the step counts.
    """
    floats = ref.shape[1]
    for i in range(len(starts) - 1):
        begin, end = starts[i], starts[i + 1]
        count, only = _touchers(touches, begin, end)
        for j in range(width, floats):
            out[i, j] = ref[i, j]
        out_t[i] = ref_t[i]
        if count == 0:
            continue
        if count == 1 and rule != MEAN_ALL:
            for j in range(width, floats):
                out[i, j] = copies[only, j]
            out_t[i] += np.uint32(touches[only])
            continue
        union, weight = effective_steps(touches[begin:end], window, rule)
        if rule == MEAN_ALL:
            weight = 1.0 / replicas
            union = union * count / replicas
        steps = math.floor(union + 0.5 + 1e-9)  # halves go up, whatever rounding noise says
        out_t[i] += np.uint32(steps)
        if optimizer == 0:
            _merge_moments(begin, end, touches, steps, copies, ref, i, width, 2 * width, beta1, False, out)
            _merge_moments(begin, end, touches, steps, copies, ref, i, 2 * width, 3 * width, beta2, True, out)
        else:
            for j in range(width, floats):
                out[i, j] = ref[i, j] + weight * _change(begin, end, touches, copies, ref, i, j)


@njit(**_JIT)
def _touchers(touches, begin, end):
    """(how many of the copies [begin, end) were stepped on, the last of them)."""
    count, only = 0, begin
    for c in range(begin, end):
        if touches[c] > 0:
            count += 1
            only = c
    return count, only


@njit(**_JIT)
def _change(begin, end, touches, copies, ref, row, column):
    change = 0.0
    for c in range(begin, end):
        if touches[c] > 0:
            change += copies[c, column] - ref[row, column]
    return change


@njit(**_JIT)
def _merge_moments(begin, end, touches, steps, copies, ref, row, first, last, beta, clip, out):
    """Decayed start plus the mean gradient statistic of the copies, as ``steps`` steps would have left it."""
    mass = 0.0
    for c in range(begin, end):
        mass += 1.0 - beta ** touches[c]
    keep = beta ** float(steps)
    for j in range(first, last):
        gained = 0.0
        for c in range(begin, end):
            if touches[c] > 0:
                term = copies[c, j] - beta ** touches[c] * ref[row, j]
                gained += max(term, 0.0) if clip else term
        out[row, j] = keep * ref[row, j] + (1.0 - keep) * gained / mass
