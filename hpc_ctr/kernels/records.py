"""Loops over records of a device table in host memory: gather, sum of gradients, row optimizers, pooling.

A record is ``x[width] | state``; the state of adam is m[width] v[width], of rowwise_adagrad one accumulator.
"""

import math

import numpy as np
from numba import njit

_JIT = dict(nogil=True, cache=True, boundscheck=False)


@njit(**_JIT)
def init_values(keys, seed, scale, dim, out):
    """x of new rows: out [n, width]; columns below ``dim`` uniform in [-scale, scale), the others zero.

    A function of (seed, key, column) alone, in integer arithmetic but for the last scaling, so that every platform,
    rank count and order of creation gives the same bits.
    """
    for i in range(len(keys)):
        state = keys[i] ^ (seed * np.uint64(0x9E3779B97F4A7C15))
        for j in range(out.shape[1]):
            if j < dim:
                state += np.uint64(0x9E3779B97F4A7C15)
                z = state
                z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                z = z ^ (z >> np.uint64(31))
                unit = np.float64(z >> np.uint64(40)) * (2.0 / 16777216.0) - 1.0  # 24 bits: exact in float32
                out[i, j] = unit * scale
            else:
                out[i, j] = 0.0


@njit(**_JIT)
def gather_x(records, slots, out):
    """out[i] = x of records[slots[i]]; out is [n, width]."""
    width = out.shape[1]
    for i in range(len(slots)):
        row = slots[i]
        for j in range(width):
            out[i, j] = records[row, j]


@njit(**_JIT)
def combine_gradients(slots, grads, scratch, out_slots, out_grads):
    """Sum the gradients of equal slots, in the order in which they stand. Returns the number of distinct slots.

    slots int32 [n], grads [n, width]; scratch int32 [rows] holds -1 everywhere before and after; out_slots int32 [n]
    and out_grads [n, width] take the result, distinct slots in the order of their first occurrence.
    """
    width = grads.shape[1]
    count = 0
    for i in range(len(slots)):
        at = scratch[slots[i]]
        if at < 0:
            scratch[slots[i]] = count
            out_slots[count] = slots[i]
            for j in range(width):
                out_grads[count, j] = grads[i, j]
            count += 1
        else:
            for j in range(width):
                out_grads[at, j] += grads[i, j]
    for i in range(count):
        scratch[out_slots[i]] = -1
    return count


@njit(**_JIT)
def step_adam(records, t, slots, grads, lr, beta1, rest1, beta2, rest2, eps, scale1, scale2):
    """One step of plain Adam (Kingma and Ba, 2015) on each of the distinct rows ``slots``; the row's own t corrects.

    records [rows, >= 3*width], t uint32 [rows], grads [n, width]. scale1[t] = 1/(1-beta1^t) and scale2[t] likewise,
    from ``bias_scales``; beyond their end both are 1. rest1 is 1-beta1, rest2 1-beta2, computed in float64 and rounded
    once. Scalars have the records' dtype, so that float32 records are stepped in float32.
    """
    width = grads.shape[1]
    for i in range(len(slots)):
        row = slots[i]
        step = t[row] + np.uint32(1)
        t[row] = step
        at = min(np.int64(step), len(scale1) - 1)
        c1 = scale1[at]
        c2 = scale2[at]
        for j in range(width):
            g = grads[i, j]
            m = beta1 * records[row, width + j] + rest1 * g
            v = beta2 * records[row, 2 * width + j] + rest2 * g * g
            records[row, width + j] = m
            records[row, 2 * width + j] = v
            records[row, j] -= lr * (m * c1) / (math.sqrt(v * c2) + eps)


def bias_scales(beta: float, length: int) -> np.ndarray:
    """1/(1-beta^t) for t = 0 .. length-1, float64; entry 0, which no step uses, is 1."""
    scales = np.ones(length)
    scales[1:] = 1.0 / (1.0 - float(beta) ** np.arange(1, length, dtype=np.float64))
    return scales


@njit(**_JIT)
def step_rowwise_adagrad(records, t, slots, grads, lr, eps):
    """One step of row-wise Adagrad: one accumulator a row takes the mean of the squared gradient."""
    width = grads.shape[1]
    for i in range(len(slots)):
        row = slots[i]
        t[row] += np.uint32(1)
        squares = 0.0
        for j in range(width):
            squares += grads[i, j] * grads[i, j]
        total = records[row, width] + squares / width
        records[row, width] = total
        rate = lr / (math.sqrt(total) + eps)
        for j in range(width):
            records[row, j] -= rate * grads[i, j]


@njit(**_JIT)
def pool_bags(values, index, offsets, fields, batch, dim, vectors, first):
    """Sum-pool the bags: vectors [batch, fields, dim] and first [batch, fields] from values [u, dim (+1)].

    index int32 [nnz] points into values; bag (f, b) is index[offsets[f*batch+b]:offsets[f*batch+b+1]]. first has
    shape [0, 0] when there are no first-order weights.
    """
    for f in range(fields):
        for b in range(batch):
            begin = offsets[f * batch + b]
            end = offsets[f * batch + b + 1]
            for j in range(dim):
                vectors[b, f, j] = 0
            total = 0.0
            for at in range(begin, end):
                row = index[at]
                for j in range(dim):
                    vectors[b, f, j] += values[row, j]
                if first.shape[0] > 0:
                    total += values[row, dim]
            if first.shape[0] > 0:
                first[b, f] = total


@njit(**_JIT)
def spread_gradients(index, offsets, fields, batch, dim, vectors_grad, first_grad, out):
    """Backward of pool_bags: out [u, dim (+1)], zeroed here, sums the gradients of the bags that used each value."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = 0
    for f in range(fields):
        for b in range(batch):
            for at in range(offsets[f * batch + b], offsets[f * batch + b + 1]):
                row = index[at]
                for j in range(dim):
                    out[row, j] += vectors_grad[b, f, j]
                if first_grad.shape[0] > 0:
                    out[row, dim] += first_grad[b, f]
