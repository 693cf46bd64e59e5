"""The oracle's rows between replicas: the merge by hand, and symmetries."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import oracle
import oracle_rows
from accept_common import concatenate, mixed_keys, random_batch
from test_oracle_self import assert_rows_close, full_batch, run


def scalar_mass_merge(ref, copies, touches, window, betas, ties):
    """The rule for one row of width 1, in plain Python. ref, copies: (x, m, v, t)."""
    touchers = [i for i, a in enumerate(touches) if a]
    if not touchers:
        return ref
    if len(touchers) == 1:
        return copies[touchers[0]]
    total = sum(touches)
    prod = 1.0
    for a in touches:
        prod *= 1 - a / window
    u = min(total, max(max(touches), window * (1 - prod)))
    u_int = round(u) if ties == "even" else math.floor(u + 0.5 + 1e-9)
    x = ref[0] + u / total * sum(copies[i][0] - ref[0] for i in touchers)
    moments = []
    for which, beta in zip((1, 2), betas):
        terms = [copies[i][which] - beta ** touches[i] * ref[which] for i in touchers]
        if which == 2:
            terms = [max(term, 0.0) for term in terms]
        moments.append(beta ** u_int * ref[which]
                       + (1 - beta ** u_int) * sum(terms) / sum(1 - beta ** touches[i] for i in touchers))
    return x, moments[0], moments[1], ref[3] + u_int


def fake_replicas(rng, replicas, rows, window, opt, hold=0.8):
    """Replicas with made-up drifted rows, and the reference they left from."""
    keys = np.sort(mixed_keys(0, np.arange(rows)))
    x, state = rng.normal(0, 1, (rows, opt.width)), rng.normal(0, 1, (rows, opt.state_width))
    half = opt.state_width // 2
    state[:, half:] = np.abs(state[:, half:])
    ref = oracle_rows.Rows(keys, x, state, rng.integers(0, 50, rows))
    out = []
    for r in range(replicas):
        held = np.ones(rows, bool) if r < 2 else rng.random(rows) < hold
        replica = object.__new__(oracle_rows.Replica)
        touches = rng.integers(0, window + 1, rows) * (rng.random(rows) < 0.6)
        replica.ranks, replica.touches = [r], touches[held]
        moved = (touches > 0)[:, None]
        drifted = np.where(moved, state + rng.normal(0, 0.3, state.shape), state)
        drifted[:, half:] = np.maximum(drifted[:, half:], 0)
        replica.rows = oracle_rows.Rows(keys[held], np.where(moved, x + rng.normal(0, 0.3, x.shape), x)[held],
                                   drifted[held], (ref.t + touches)[held])
        replica.state_touches = replica.touches
        out.append(replica)
    return out, ref


@pytest.mark.parametrize("ties", ["up", "even"])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_mass_rule_by_hand(window, ties):
    rng = np.random.default_rng(window)
    opt = oracle.Options(workers=4, dim=1, row_betas=(0.9, 0.99), ties=ties)
    replicas, ref = fake_replicas(rng, 4, 60, window, opt)
    want, seen = {}, set()
    for i, key in enumerate(ref.keys.tolist()):
        before = (ref.x[i, 0], ref.state[i, 0], ref.state[i, 1], int(ref.t[i]))
        copies, touches = [], []
        for replica in replicas:
            at, here = replica.rows.find(ref.keys[i:i + 1])
            rows, j = replica.rows, int(at[0])
            record = (rows.x[j, 0], rows.state[j, 0], rows.state[j, 1], int(rows.t[j]))
            copies.append(record if here[0] else before)
            touches.append(int(replica.touches[j]) if here[0] else 0)
        want[key] = scalar_mass_merge(before, copies, touches, window, (0.9, 0.99), ties)
        seen.add(sum(a > 0 for a in touches))
    assert seen >= {0, 1, 2, 3}
    oracle_rows.merge_rows(replicas, ref, window, opt, window)
    for i, key in enumerate(ref.keys.tolist()):
        x, m, v, t = want[key]
        np.testing.assert_allclose([ref.x[i, 0], *ref.state[i]], [x, m, v], rtol=0, atol=1e-13)
        assert ref.t[i] == t
    for replica in replicas:
        at, here = ref.find(replica.rows.keys)
        assert here.all() and not replica.touches.any()
        np.testing.assert_array_equal(replica.rows.x, ref.x[at])
        np.testing.assert_array_equal(replica.rows.state, ref.state[at])
        np.testing.assert_array_equal(replica.rows.t, ref.t[at])


@pytest.mark.parametrize("touches, window, mass", [
    ((3, 0, 0), 20, 3.0),                                   # one toucher: all of its updates
    ((20, 20), 20, 20.0),                                   # every step on both: as many as one replica takes
    ((1, 1), 1, 1.0), ((1, 1), 2, 1.5), ((1, 2), 4, 2.5), ((0, 0), 5, 0.0),
    ((1, 1, 1, 1), 1000, 1000 * (1 - 0.999 ** 4)),          # rare: nearly the sum
])
def test_mass_counts(touches, window, mass):
    got = oracle_rows.effective_updates(np.array(touches)[:, None], window, "mass")
    np.testing.assert_allclose(got, [mass], rtol=0, atol=1e-12)


def test_halves():
    u = np.array([0.5, 1.5, 2.5, 6.499999999999999])
    assert oracle_rows.rounded(u, "up").tolist() == [1, 2, 3, 7]
    assert oracle_rows.rounded(u, "even").tolist() == [0, 2, 2, 6]


def test_rows_touched_in_every_step_of_the_window_merge_to_the_mean():
    """All replicas touch the row in every step: U = W, so x, m and v are the means and t moves by W."""
    rng = np.random.default_rng(11)
    batches = [[full_batch(rng, 6), full_batch(rng, 6)] for _ in range(4)]
    merged = run(batches, fields=2, replica="rank", k_rows=4, dense_lr=0.0)
    alone = [run([[row[r]] for row in batches], fields=2, dense_lr=0.0).rows[-1] for r in range(2)]
    for key, (x, state, t) in merged.rows[-1].items():
        np.testing.assert_allclose(x, (alone[0][key][0] + alone[1][key][0]) / 2, rtol=0, atol=1e-14)
        np.testing.assert_allclose(state, (alone[0][key][1] + alone[1][key][1]) / 2, rtol=0, atol=1e-14)
        assert t == 4
    mean = run(batches, fields=2, replica="rank", k_rows=4, dense_lr=0.0, rule="mean")
    assert_rows_close(mean.rows[-1], merged.rows[-1], 1e-14)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_replicas_with_the_same_full_batches_are_one_replica(optimizer):
    rng = np.random.default_rng(12)
    one = [full_batch(rng, 6) for _ in range(10)]
    two = run([[b, b] for b in one], [6], fields=2, replica="rank", k_rows=3, k=4, row_optimizer=optimizer)
    alone = run([[b] for b in one], [6], fields=2, k=4, row_optimizer=optimizer)
    assert_rows_close(two.rows[-1], alone.rows[-1], 1e-14)
    np.testing.assert_allclose(two.dense[0]["x"], alone.dense[0]["x"], rtol=0, atol=1e-14)


def test_exclusive_rows_never_merge_and_go_on_with_their_next_holder():
    """Replicas with disjoint keys in each pass are independent; a row keeps its state when another takes
    it over.
    """
    def disjoint(rng, half, samples=5):
        batch = random_batch(rng, samples)
        return replace(batch, keys=(batch.keys & ~np.uint64(1)) | np.uint64(half))

    rng = np.random.default_rng(13)
    first = [[disjoint(rng, 0), disjoint(rng, 1)] for _ in range(5)]
    second = [[disjoint(rng, 1), disjoint(rng, 0)] for _ in range(5)]      # the halves change places
    got = run(first + second, [5], replica="rank", k_rows=2, dense_lr=0.0)
    halves = [[row[0] for row in first] + [row[1] for row in second],
              [row[1] for row in first] + [row[0] for row in second]]
    for half in halves:
        alone = run([[b] for b in half], dense_lr=0.0)
        assert_rows_close({k: got.rows[-1][k] for k in alone.rows[-1]}, alone.rows[-1], 0.0)


@pytest.mark.parametrize("rule", ["mass", "mean", "mean_all", "sum"])
def test_one_toucher(rule):
    """A shared row that one replica touched: its row as it is, but for mean over all, which divides the
    move.
    """
    rng = np.random.default_rng(14)
    opt = oracle.Options(workers=2, dim=2, rule=rule)
    replicas, ref = fake_replicas(rng, 2, 10, 5, opt)
    replicas[0].touches[:], replicas[1].touches[:] = 2, 0
    for array in ("x", "state", "t"):
        setattr(replicas[1].rows, array, getattr(ref, array).copy())
    before, copy = ref.x.copy(), replicas[0].rows.x.copy()
    oracle_rows.merge_rows(replicas, ref, 5, opt, 5)
    if rule == "mean_all":
        np.testing.assert_allclose(ref.x, (before + copy) / 2, rtol=0, atol=1e-15)
    else:
        np.testing.assert_array_equal(ref.x, copy)


def test_replica_gradient_is_the_mean_over_the_replicas_samples():
    """Two workers of one replica with 2 and 6 samples step the rows like one with the 8, each with its own
    dense.
    """
    rng = np.random.default_rng(15)
    step = [random_batch(rng, 2), random_batch(rng, 6)]
    pair = run([step], replica="world")
    one = run([[concatenate(step)]])
    assert_rows_close(pair.rows[-1], one.rows[-1], 1e-15)
