"""The loops over records, the row merge and the key set, each against a twin in plain numpy."""

import math

import numpy as np
import pytest

from hpc_ctr.embedding.init import init_rows
from hpc_ctr.kernels import merge, records
from hpc_ctr.kernels.keyset import KeySet

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
SIZES = pytest.mark.parametrize("rows, width", [(0, 1), (1, 1), (7, 3), (33, 17)])
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}
MASK = 2**64 - 1


def close(got, want, dtype):
    """Whether two arrays agree to the rounding of ``dtype``."""
    return np.allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# ---------------------------------------------------------------- initial values


def twin_of_init(key: int, seed: int, dim: int) -> list[float]:
    """Values in [-1, 1) of one key: splitmix64 in Python's own integers, 24 bits a value."""
    out = []
    state = key ^ (seed * 0x9E3779B97F4A7C15 & MASK)
    for _ in range(dim):
        state = state + 0x9E3779B97F4A7C15 & MASK
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        out.append(((z ^ z >> 31) >> 40) * 2.0**-23 - 1.0)
    return out


# (seed, key) -> the first three values at scale 1; the first line is splitmix64's published sequence from state 0
WRITTEN_DOWN = {
    (0, 0): [0.7666215896606445, -0.13694405555725098, -0.9471324682235718],
    (0, 1): [0.13312304019927979, 0.49156343936920166, 0.9420053958892822],
    (1, 0x123456789ABCDEF): [-0.754295825958252, 0.12284159660339355, 0.5445237159729004],
    (7, 0xFFFFFFFFFFFFFFFF): [0.11815452575683594, -0.398356556892395, -0.8445087671279907],
    (9223372036854775813, 0x40000000000000): [-0.13220727443695068, -0.39796626567840576, 0.8031882047653198],
}


@pytest.mark.parametrize("seed, key", WRITTEN_DOWN)
def test_initial_values_are_those_written_down(seed, key):
    for dtype in (np.float32, np.float64):
        got = init_rows(np.array([key], np.uint64), seed, 3, 3, 1.0, dtype)
        assert got.dtype == dtype and got.tolist() == [WRITTEN_DOWN[seed, key]]
    assert twin_of_init(key, seed, 3) == WRITTEN_DOWN[seed, key]


@DTYPES
@SIZES
def test_initial_values_equal_the_twin(rows, width, dtype):
    rng = np.random.default_rng(rows)
    keys = rng.integers(0, 2**64, rows, np.uint64)
    for dim in {0, width // 2, width}:
        got = init_rows(keys, 5, width, dim, 0.25, dtype)
        want = np.zeros((rows, width))
        for i, key in enumerate(keys.tolist()):
            want[i, :dim] = np.array(twin_of_init(key, 5, dim)) * 0.25  # a power of two: exact in both types
        assert got.shape == (rows, width) and np.array_equal(got, want)


def test_initial_values_do_not_depend_on_order_or_company():
    keys = np.random.default_rng(1).integers(0, 2**64, 50, np.uint64)
    order = np.random.default_rng(2).permutation(50)
    whole = init_rows(keys, 3, 5, 4, 0.01)
    assert np.array_equal(init_rows(keys[order], 3, 5, 4, 0.01), whole[order])
    assert np.array_equal(init_rows(keys[7:8], 3, 5, 4, 0.01), whole[7:8])
    assert not np.array_equal(init_rows(keys, 4, 5, 4, 0.01), whole)
    assert np.abs(whole).max() <= np.float32(0.01) and len(np.unique(whole[:, :4])) == 200 and not whole[:, 4].any()


# ---------------------------------------------------------------- gather, sum of gradients


@DTYPES
@SIZES
def test_gather(rows, width, dtype):
    rng = np.random.default_rng(rows)
    table = rng.normal(size=(rows + 1, 3 * width)).astype(dtype)
    slots = rng.integers(0, rows + 1, rows).astype(np.int32)
    out = np.full((rows, width), np.nan, dtype)
    records.gather_x(table, slots, out)
    assert np.array_equal(out, table[slots, :width])


def combined(slots, grads, rows):
    """The kernel's result with a scratch of ``rows`` entries; checks that the scratch is clean afterwards."""
    scratch = np.full(rows, -1, np.int32)
    distinct, sums = np.empty(len(slots), np.int32), np.full(grads.shape, np.nan, grads.dtype)
    n = records.combine_gradients(slots, grads, scratch, distinct, sums)
    assert (scratch == -1).all()
    return distinct[:n], sums[:n]


@DTYPES
@SIZES
def test_gradients_are_summed_in_the_order_given(rows, width, dtype):
    rng = np.random.default_rng(rows)
    slots = rng.integers(0, rows // 2 + 1, rows).astype(np.int32)
    # of very different size, so that another order gives other bits
    grads = (rng.normal(size=(rows, width)) * 10.0 ** rng.integers(-6, 7, (rows, 1))).astype(dtype)
    want = {}
    for slot, grad in zip(slots.tolist(), grads):
        want[slot] = want[slot] + grad if slot in want else grad
    distinct, sums = combined(slots, grads, rows // 2 + 1)
    assert distinct.tolist() == list(want)
    assert all(np.array_equal(a, b) for a, b in zip(sums, want.values()))


def test_order_of_gradients_matters_to_the_last_bit():
    grads = np.array([[1e8], [1.0], [-1e8]], np.float32)
    slots = np.zeros(3, np.int32)
    assert combined(slots, grads, 1)[1].tolist() == [[0.0]]
    assert combined(slots, grads[[0, 2, 1]], 1)[1].tolist() == [[1.0]]


# ---------------------------------------------------------------- row optimizers


@DTYPES
@SIZES
def test_adam(rows, width, dtype):
    rng = np.random.default_rng(rows)
    lr, b1, b2, eps = 0.05, 0.9, 0.99, 1e-6
    scale1, scale2 = (records.bias_scales(beta, 5000).astype(dtype) for beta in (b1, b2))
    table = np.zeros((rows + 3, 3 * width), dtype)
    table[:, :width] = rng.normal(size=(rows + 3, width))
    t = np.zeros(rows + 3, np.uint32)
    x, m, v = (np.float64(table[:, i * width:(i + 1) * width]) for i in range(3))
    for step in range(6):
        slots = rng.permutation(rows + 3)[:max(rows - step, 0)].astype(np.int32)
        grads = rng.normal(size=(len(slots), width)).astype(dtype)
        records.step_adam(table, t, slots, grads, dtype(lr), dtype(b1), dtype(1 - b1), dtype(b2), dtype(1 - b2),
                          dtype(eps), scale1, scale2)
        m[slots] = b1 * m[slots] + (1 - b1) * grads
        v[slots] = b2 * v[slots] + (1 - b2) * np.float64(grads) ** 2
        now = t[slots].astype(np.float64)[:, None]
        x[slots] -= lr * (m[slots] / (1 - b1**now)) / (np.sqrt(v[slots] / (1 - b2**now)) + eps)
        assert close(table, np.concatenate([x, m, v], 1), dtype)
    assert t.sum() == sum(max(rows - step, 0) for step in range(6))


def test_bias_scales_and_steps_beyond_their_end():
    scales = records.bias_scales(0.9, 4)
    assert np.allclose(scales, [1, 10, 1 / 0.19, 1 / 0.271], rtol=1e-15)
    assert np.array_equal(records.bias_scales(0.0, 3), np.ones(3))
    table = np.array([[0.0, 0.0, 0.0]])
    t = np.array([10**9], np.uint32)
    one = np.ones(3)
    records.step_adam(table, t, np.zeros(1, np.int32), np.array([[2.0]]), 0.1, 0.5, 0.5, 0.75, 0.25, 0.0, one, one)
    assert t[0] == 10**9 + 1 and table.tolist() == [[-0.1, 1.0, 1.0]]


@DTYPES
@SIZES
def test_rowwise_adagrad(rows, width, dtype):
    rng = np.random.default_rng(rows)
    table = rng.normal(size=(rows + 3, width + 1)).astype(dtype)
    table[:, width] = 0
    t = np.zeros(rows + 3, np.uint32)
    x, total = np.float64(table[:, :width]), np.zeros(rows + 3)
    for _ in range(5):
        slots = rng.permutation(rows + 3)[:rows].astype(np.int32)
        grads = rng.normal(size=(rows, width)).astype(dtype)
        records.step_rowwise_adagrad(table, t, slots, grads, dtype(0.1), dtype(1e-6))
        total[slots] += (np.float64(grads) ** 2).mean(1)
        x[slots] -= 0.1 / (np.sqrt(total[slots])[:, None] + 1e-6) * grads
        assert close(table[:, :width], x, dtype) and close(table[:, width], total, dtype)
    assert t.sum() == 5 * rows


def test_rowwise_adagrad_without_gradient_and_eps_moves_nothing_to_nan():
    table = np.array([[1.0, 0.0]])
    records.step_rowwise_adagrad(table, np.zeros(1, np.uint32), np.zeros(1, np.int32), np.zeros((1, 1)), 0.1, 1e-8)
    assert table.tolist() == [[1.0, 0.0]]


# ---------------------------------------------------------------- pooling


def bags_of(rng, fields, batch, values):
    """Random bags, about a third of them empty: index int32 [nnz] and offsets int64 [fields*batch+1]."""
    lengths = np.maximum(rng.integers(-1, 4, fields * batch), 0)
    if not values:
        lengths[:] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return rng.integers(0, max(values, 1), int(offsets[-1])).astype(np.int32), offsets


@DTYPES
@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("fields, batch, values, dim", [(1, 1, 1, 1), (3, 5, 7, 4), (2, 9, 4, 0), (4, 0, 0, 3),
                                                        (2, 3, 0, 3)])
def test_pooling_and_its_gradient(fields, batch, values, dim, first_order, dtype):
    rng = np.random.default_rng(fields * batch)
    index, offsets = bags_of(rng, fields, batch, values)
    table = rng.normal(size=(values, dim + first_order)).astype(dtype)
    vectors = np.full((batch, fields, dim), np.nan, dtype)
    first = np.full((batch, fields) if first_order else (0, 0), np.nan, dtype)
    records.pool_bags(table, index, offsets, fields, batch, dim, vectors, first)

    # the matrix that sums the bags: its transpose is the backward pass
    spread = np.zeros((fields * batch, values))
    np.add.at(spread, (np.repeat(np.arange(fields * batch), np.diff(offsets)), index), 1.0)
    sums = (spread @ table).reshape(fields, batch, dim + first_order).transpose(1, 0, 2)
    assert close(vectors, sums[..., :dim], dtype)
    assert not first_order or close(first, sums[..., dim], dtype)

    grads = rng.normal(size=(batch, fields, dim + first_order)).astype(dtype)
    out = np.full(table.shape, np.nan, dtype)
    first_grad = np.ascontiguousarray(grads[..., dim]) if first_order else np.zeros((0, 0), dtype)
    vectors_grad = np.ascontiguousarray(grads[..., :dim])
    records.spread_gradients(index, offsets, fields, batch, dim, vectors_grad, first_grad, out)
    flat = grads.transpose(1, 0, 2).reshape(fields * batch, dim + first_order)
    assert close(out, spread.T @ flat, dtype)


# ---------------------------------------------------------------- row merge


def merged(copies, copies_t, ref, ref_t, window, optimizer, width, rule="mass", replicas=4, betas=(0.9, 0.99)):
    """``merge_x`` and ``merge_state`` on lists of copies, one list a row. Returns (records, t)."""
    dtype = ref.dtype
    starts = np.cumsum([0, *(len(c) for c in copies)])
    flat = np.array([c for row in copies for c in row], dtype).reshape(-1, ref.shape[1])
    touches = np.array([t - before for row, before in zip(copies_t, ref_t) for t in row], np.float64)
    out, out_t = np.full_like(ref, np.nan), np.zeros(len(ref), np.uint32)
    rest = (float(window), merge.RULES[rule], float(replicas))
    merge.merge_x(starts, flat, touches, ref, *rest, width, out)
    assert np.isnan(out[:, width:]).all()
    merge.merge_state(starts, flat, touches, ref, np.array(ref_t, np.uint32), *rest, optimizer, width, *betas, out, out_t)
    return out, out_t


def twin_of_mass(copies, a, ref, t_ref, window, optimizer, width, betas):
    """The rule of docs/architecture.md for one row with the copies ``copies`` that took ``a`` steps each."""
    if len(copies) == 0:
        return ref, t_ref
    if len(copies) == 1:
        return copies[0], t_ref + a[0]
    total = sum(a)
    union = min(total, max(max(a), window * (1 - math.prod(1 - each / window for each in a))))
    steps = math.floor(union + 0.5 + 1e-9)
    out = ref + union / total * sum(c - ref for c in copies)
    if optimizer == 0:
        for part, beta in ((1, betas[0]), (2, betas[1])):
            at = slice(part * width, (part + 1) * width)
            terms = [c[at] - beta**each * ref[at] for c, each in zip(copies, a)]
            if part == 2:
                terms = [np.maximum(term, 0) for term in terms]
            mass = sum(1 - beta**each for each in a)
            out[at] = beta**steps * ref[at] + (1 - beta**steps) * sum(terms) / mass
    return out, t_ref + steps


@DTYPES
@pytest.mark.parametrize("optimizer, state", [(0, 2), (1, None)])
@pytest.mark.parametrize("width", [1, 5])
def test_mass_rule(width, optimizer, state, dtype):
    rng = np.random.default_rng(width)
    floats = width * 3 if optimizer == 0 else width + 1
    window, betas = 20, (0.9, 0.99)
    counts = [0, 1, 2, 4, 3, 2, 0, 1, 8]
    ref = rng.normal(size=(len(counts), floats)).astype(dtype)
    ref[:, 2 * width if optimizer == 0 else width:] **= 2  # second moments and accumulators are not negative
    ref_t = rng.integers(0, 1000, len(counts))
    steps = [rng.integers(1, window + 1, n).tolist() for n in counts]
    copies = [[ref[i] + np.abs(rng.normal(size=floats)).astype(dtype) for _ in range(n)] for i, n in enumerate(counts)]
    copies_t = [[int(ref_t[i]) + a for a in mine] for i, mine in enumerate(steps)]
    got, got_t = merged(copies, copies_t, ref, ref_t, window, optimizer, width)
    for i in range(len(counts)):
        exact = [np.float64(c) for c in copies[i]]
        want, want_t = twin_of_mass(exact, steps[i], np.float64(ref[i]), int(ref_t[i]), window, optimizer, width, betas)
        assert close(got[i], want, dtype) and got_t[i] == want_t, i


def test_nothing_to_merge():
    out, out_t = merged([], [], np.zeros((0, 6)), [], 5, 0, 2)
    assert out.shape == (0, 6) and len(out_t) == 0


@DTYPES
@pytest.mark.parametrize("rule", ["mass", "mean", "sum"])
def test_one_toucher_is_copied_and_none_leaves_the_reference(rule, dtype):
    rng = np.random.default_rng(0)
    ref, copy = rng.normal(size=(2, 9)).astype(dtype), rng.normal(size=9).astype(dtype)
    out, out_t = merged([[copy], []], [[17], []], ref, [10, 4], 20, 0, 3, rule)
    assert out[0].tobytes() == copy.tobytes() and out_t[0] == 17
    assert out[1].tobytes() == ref[1].tobytes() and out_t[1] == 4


@pytest.mark.parametrize("a, window, union", [
    ([1, 1], 2, 1.5), ([2, 2], 8, 3.5), ([1, 2], 4, 2.5), ([5, 5], 5, 5.0), ([3, 1], 3, 3.0), ([1, 1, 1, 1], 2, 1.875),
    ([3, 5], 6, 5.5), ([1, 1], 1, 1.0)])
def test_effective_steps_by_hand_and_halves_go_up(a, window, union):
    got, weight = merge.effective_steps(np.array(a, np.float64), float(window), merge.MASS)
    assert got == pytest.approx(union, abs=1e-12) and weight == pytest.approx(union / sum(a), abs=1e-12)
    ref = np.zeros((1, 3))
    _, out_t = merged([[np.ones(3)] * len(a)], [a], ref, [0], window, 0, 1)
    assert out_t[0] == math.floor(union + 0.5)


@pytest.mark.parametrize("n", [2, 3, 7, 16])
def test_effective_steps_stay_between_the_most_of_one_copy_and_all_steps(n):
    rng = np.random.default_rng(n)
    for window in (1, 2, 20):
        a = rng.integers(1, window + 1, n).astype(np.float64)
        union, _ = merge.effective_steps(a, float(window), merge.MASS)
        assert a.max() <= union <= min(a.sum(), window)


@DTYPES
def test_second_moment_is_never_negative(dtype):
    # copies whose v fell faster than beta2 allows (rounding, or a value restored by hand)
    ref = np.array([[0, 0, 1]], dtype)
    out, _ = merged([[np.zeros(3), np.full(3, -1e-3)]], [[2, 3]], ref, [0], 5, 0, 1)
    assert 0 <= out[0, 2] < 1


def test_other_rules_by_hand():
    ref = np.array([[1.0, 0.5]])
    copies, t = [[np.array([2.0, 1.0]), np.array([4.0, 3.0])]], [[3, 5]]
    by_rule = {rule: merged(copies, t, ref, [0], 6, 1, 1, rule, replicas=4) for rule in ("mean", "sum", "mean_all")}
    assert by_rule["mean"][0].tolist() == [[3.0, 2.0]] and by_rule["mean"][1] == 4
    assert by_rule["sum"][0].tolist() == [[5.0, 3.5]] and by_rule["sum"][1] == 8
    assert by_rule["mean_all"][0].tolist() == [[2.0, 1.25]] and by_rule["mean_all"][1] == 2
    alone = merged([[np.array([3.0, 0.5])]], [[4]], ref, [0], 6, 1, 1, "mean_all", replicas=4)
    assert alone[0].tolist() == [[1.5, 0.5]] and alone[1] == 1


@DTYPES
@pytest.mark.parametrize("rule", merge.RULES)
@pytest.mark.parametrize("optimizer", [0, 1])
def test_copies_that_were_not_stepped_on_do_not_count(rule, optimizer, dtype):
    rng = np.random.default_rng(4)
    floats = 6 if optimizer == 0 else 3
    ref = np.abs(rng.normal(size=(3, floats))).astype(dtype)
    copies = [[np.abs(rng.normal(size=floats)).astype(dtype) for _ in range(n)] for n in (2, 1, 0)]
    idle = [[np.full(floats, 1e6, dtype), *row] for row in copies]
    want = merged(copies, [[4, 7], [5], []], ref, [3, 2, 1], 9, optimizer, 2, rule)
    got = merged(idle, [[3, 4, 7], [2, 5], [1]], ref, [3, 2, 1], 9, optimizer, 2, rule)
    assert got[0].tobytes() == want[0].tobytes() and got[1].tolist() == want[1].tolist()


def test_copies_that_agree_merge_to_what_they_are():
    """All replicas took every step of the window and came to the same state: that is the result, moments too."""
    rng = np.random.default_rng(3)
    ref, copy = np.abs(rng.normal(size=(1, 6))), np.abs(rng.normal(size=6)) + 1
    out, out_t = merged([[copy] * 3], [[7] * 3], ref, [2], 5, 0, 2)
    assert out_t[0] == 7
    assert np.allclose(out[0, :2], ref[0, :2] + (copy - ref[0])[:2] * 3 * (5 / 15))
    assert np.allclose(out[0], copy, rtol=1e-12)


# ---------------------------------------------------------------- set of keys


@pytest.mark.parametrize("sizes", [[0], [1], [0, 0, 3], [1000, 24, 1], [5000, 5000, 5000]])
def test_key_set_counts_like_a_set(sizes):
    rng = np.random.default_rng(len(sizes))
    mine, twin = KeySet(), set()
    for n in sizes:
        keys = rng.integers(0, 3000, n).astype(np.uint64)
        before = len(twin)
        twin.update(keys.tolist())
        assert mine.add(keys) == len(twin) - before
        assert len(mine) == len(twin)
    assert mine.add(np.array(sorted(twin), np.uint64)) == 0


def test_key_set_takes_zero_the_largest_key_and_keys_with_equal_low_bits():
    keys = KeySet()
    assert keys.add(np.array([0, 0, 2**64 - 1], np.uint64)) == 2
    assert keys.add(np.array([0], np.uint64)) == 0 and len(keys) == 2
    same_low_bits = (np.arange(1, 5001, dtype=np.uint64) << np.uint64(40)) | np.uint64(5)
    assert keys.add(same_low_bits) == 5000 and keys.add(same_low_bits[::-1]) == 0 and len(keys) == 5002
