"""The oracle against things that are known: torch.optim.Adam, the merge formulas by hand, and symmetries."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

sys.path.insert(0, str(Path(__file__).resolve().parent))

import oracle
from accept_common import (
    FIELDS,
    NUM_DENSE,
    TinyNet,
    TinyWideNet,
    by_step,
    concatenate,
    mixed_keys,
    plain_spec,
    rank_batches,
)

from hpc_ctr.data.batch import Batch

DIM = 4


def build(dtype="float64", cls=TinyNet, num_dense=NUM_DENSE, fields=len(FIELDS)):
    return lambda: cls(plain_spec(num_dense, fields, DIM, dtype))


def keys_init(width=DIM):
    def values(keys):
        small = (keys % np.uint64(9973)).astype(np.float64)
        return np.stack([np.sin(small * (c + 1)) for c in range(width)], 1) * 0.1
    return values


def run(batches, pass_ends=None, cls=TinyNet, fields=len(FIELDS), **options):
    opt = oracle.Options(workers=len(batches[0]), dim=DIM, first_order=cls.first_order, **options)
    model = build(opt.dtype, cls, fields=fields)
    return oracle.simulate(batches, model, opt, keys_init(opt.width), pass_ends)


def assert_rows_close(got: oracle.RowDict, want: oracle.RowDict, tolerance: float) -> None:
    assert got.keys() == want.keys()
    for key in want:
        assert got[key][2] == want[key][2]
        np.testing.assert_allclose(got[key][0], want[key][0], rtol=0, atol=tolerance)
        np.testing.assert_allclose(got[key][1], want[key][1], rtol=0, atol=tolerance)


def full_batch(rng, samples, ids=3, fields=2):
    """A batch in which every id of every (single-valued) field occurs."""
    keys = [mixed_keys(f, rng.permutation(np.arange(samples) % ids)) for f in range(fields)]
    return Batch((rng.random(samples) < 0.4).astype(np.float32),
                 rng.normal(0, 1, (samples, NUM_DENSE)).astype(np.float32),
                 np.concatenate(keys), np.arange(fields * samples + 1, dtype=np.int64))


# ---------------------------------------------------------------- against torch


@pytest.mark.parametrize("dense", ["sync", "kstep"])
def test_one_worker_is_torch_adam_on_dense_and_rows(dense):
    """Every key is in every batch, so lazy row Adam is plain Adam on an embedding; k-step Adam before its
    first
    merge is Adam too."""
    rng = np.random.default_rng(1)
    steps, ids = 12, 3
    batches = [[full_batch(rng, 9, ids)] for _ in range(steps)]
    got = run(batches, fields=2, dense=dense, k=100, row_lr=0.02, dense_lr=0.01)

    all_keys = np.concatenate([mixed_keys(f, np.arange(ids)) for f in range(2)])
    number = {key: i for i, key in enumerate(all_keys.tolist())}
    table = torch.nn.Parameter(torch.from_numpy(keys_init()(all_keys)))
    model = build(fields=2)()
    optimizer = torch.optim.Adam([{"params": model.parameters(), "lr": 0.01},
                                  {"params": [table], "lr": 0.02}])
    for step, (batch,) in enumerate(batches):
        at = torch.tensor([number[k] for k in batch.keys.tolist()]).reshape(2, batch.size).T
        logits = model(torch.from_numpy(batch.dense).double(), (table[at],))
        loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label).double())
        np.testing.assert_allclose(got.logits[step][0], logits.detach().numpy(), rtol=0, atol=1e-12)
        assert abs(got.losses[step, 0] - loss.item()) < 1e-12
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    want = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    np.testing.assert_allclose(got.dense[0]["x"], want, rtol=0, atol=1e-12)
    assert got.dense[0]["t"] == steps
    for key, i in number.items():
        x, state, t = got.rows[-1][key]
        np.testing.assert_allclose(x, table.detach().numpy()[i], rtol=0, atol=1e-12)
        for mine, name in ((state[:DIM], "exp_avg"), (state[DIM:], "exp_avg_sq")):
            np.testing.assert_allclose(mine, optimizer.state[table][name].numpy()[i], rtol=0, atol=1e-12)
        assert t == steps


def test_rowwise_adagrad_against_autograd():
    """Rows with a frozen dense part, bags and repeated keys pooled by torch's own embedding_bag."""
    batches = by_step(rank_batches("even", 1, 10, 8, seed=3))
    got = run(batches, cls=TinyWideNet, row_optimizer="rowwise_adagrad", row_lr=0.1, dense_lr=0.0)
    all_keys = np.unique(np.concatenate([b.keys for (b,) in batches]))
    table = torch.from_numpy(keys_init(DIM + 1)(all_keys)).requires_grad_(True)
    acc = torch.zeros(len(all_keys), 1, dtype=torch.float64)
    model = build(cls=TinyWideNet)()
    for step, (batch,) in enumerate(batches):
        at = torch.from_numpy(np.searchsorted(all_keys, batch.keys))
        pooled = functional.embedding_bag(at, table, torch.from_numpy(batch.offsets[:-1]), mode="sum")
        pooled = pooled.reshape(len(FIELDS), batch.size, DIM + 1).transpose(0, 1)
        logits = model(torch.from_numpy(batch.dense).double(), (pooled[..., :DIM],), pooled[..., DIM])
        np.testing.assert_allclose(got.logits[step][0], logits.detach().numpy(), rtol=0, atol=1e-12)
        loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label).double())
        grad, = torch.autograd.grad(loss, table)
        with torch.no_grad():
            acc += (grad ** 2).mean(1, keepdim=True)
            touched = torch.zeros(len(all_keys), 1).index_fill_(0, at, 1).bool()
            table.copy_(torch.where(touched, table - 0.1 * grad / (acc.sqrt() + 1e-8), table))
    for i, key in enumerate(all_keys.tolist()):
        np.testing.assert_allclose(got.rows[-1][key][0], table.detach().numpy()[i], rtol=0, atol=1e-12)
        np.testing.assert_allclose(got.rows[-1][key][1], acc.numpy()[i], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- synchronous settings


@pytest.mark.parametrize("case", ["even", "uneven", "starved", "holes"])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_world_and_sync_equal_one_worker_with_all_samples(case, optimizer):
    per_rank = rank_batches(case, 4, 14, 5, seed=4)
    batches = by_step(per_rank)
    ends = [5, 9]
    many = run(batches, ends, dense="sync", row_optimizer=optimizer)
    one = run([[concatenate(step)] for step in batches], ends, dense="sync", row_optimizer=optimizer)
    for worker in many.dense:
        np.testing.assert_allclose(worker["x"], one.dense[0]["x"], rtol=0, atol=1e-12)
        assert worker["t"] == one.dense[0]["t"]
    assert_rows_close(many.rows[-1], one.rows[-1], 1e-12)
    sizes = np.array([[b.size for b in step] for step in batches])
    weighted = np.nansum(many.losses * sizes, axis=1) / np.maximum(sizes.sum(1), 1)
    np.testing.assert_allclose(weighted, np.nan_to_num(one.losses[:, 0]), rtol=0, atol=1e-12)
    assert many.row_merges == 0 and many.dense_merges == 0


def test_pass_ends_change_nothing_with_one_replica():
    batches = by_step(rank_batches("uneven", 2, 20, 6, seed=5))
    a, b = run(batches, [3, 4, 11]), run(batches)
    np.testing.assert_array_equal(a.losses, b.losses)
    assert_rows_close(a.rows[-1], b.rows[-1], 0.0)
    assert len(a.rows) == 4 and len(b.rows) == 1 and a.pass_ends == [3, 4, 11, 20]


# ---------------------------------------------------------------- dense k-step


def fixed_row_gradient(model, batch):
    """Gradient of the mean loss by the flat dense parameters, rows at their first value."""
    pooled = np.zeros((len(batch.offsets) - 1, DIM))
    np.add.at(pooled, np.repeat(np.arange(len(pooled)), np.diff(batch.offsets)), keys_init()(batch.keys))
    vectors = torch.from_numpy(pooled.reshape(len(FIELDS), batch.size, DIM).transpose(1, 0, 2).copy())
    loss = functional.binary_cross_entropy_with_logits(
        model(torch.from_numpy(batch.dense).double(), (vectors,)), torch.from_numpy(batch.label).double())
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]).numpy()


@pytest.mark.parametrize("mode", ["adam", "amsgrad"])
def test_k1_in_the_paper_form_is_one_process_with_mean_gradient_and_mean_square(mode):
    """k = 1, no guard, no bias correction: m from mean(g), the denominator from mean(g^2) of the step
    before.
    """
    batches = by_step(rank_batches("even", 3, 15, 6, seed=6))
    lr, b1, b2, eps = 0.004, 0.9, 0.99, 1e-6
    got = run(batches, row_lr=0.0, k=1, mode=mode, guard=False, bias_correction=False, dense_lr=lr,
              dense_betas=(b1, b2), dense_eps=eps)
    model = build()()
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    m = mean_v = vhat = 0.0
    v = [0.0] * 3
    ms = [0.0] * 3
    for step, row in enumerate(batches):
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.from_numpy(flat), model.parameters())
        grads = [fixed_row_gradient(model, batch) for batch in row]
        m = b1 * m + (1 - b1) * sum(grads) / 3
        mean_v = b2 * mean_v + (1 - b2) * sum(g * g for g in grads) / 3
        ms = [b1 * a + (1 - b1) * g for a, g in zip(ms, grads)]
        v = [b2 * a + (1 - b2) * g * g for a, g in zip(v, grads)]
        if step == 0:                       # no merge yet: each by its own v
            flat = flat - lr * sum(a / (np.sqrt(c) + eps) for a, c in zip(ms, v)) / 3
        else:
            flat = flat - lr * m / (np.sqrt(vhat) + eps)
        vhat = np.maximum(vhat, mean_v) if mode == "amsgrad" else mean_v
    for worker in got.dense:
        np.testing.assert_allclose(worker["x"], flat, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.vhat, vhat, rtol=0, atol=1e-15)
    assert got.dense_merges == 15


@pytest.mark.parametrize("mode", ["adam", "amsgrad"])
@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_kstep_local_steps_and_merge_by_hand(mode, guard, bias_correction):
    """Three workers, four parameters, scalar loops over the formulas of the method."""
    rng = np.random.default_rng(7)
    opt = oracle.Options(workers=3, mode=mode, guard=guard, bias_correction=bias_correction, dense_lr=0.05,
                         dense_betas=(0.8, 0.9), dense_eps=1e-3)

    class Quadratic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.p = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.1, 0.7], dtype=torch.float64))

    workers = [oracle.Worker(Quadratic(), torch.float64) for _ in range(3)]
    grads = rng.normal(0, 1, (9, 3, 4))
    stepping = rng.random((9, 3)) < 0.7
    stepping[3:6, 2] = False                                # no step of worker 2 between two merges
    x = [[0.3, -0.2, 0.1, 0.7] for _ in range(3)]
    m = [[0.0] * 4 for _ in range(3)]
    v = [[0.0] * 4 for _ in range(3)]
    t = [0] * 3
    fresh = [False] * 3
    merge, vhat = oracle.DenseMerge(workers, opt), None
    for s in range(9):
        for i in range(3):
            if not stepping[s, i]:
                continue
            oracle.kstep_local(workers[i], grads[s, i], merge.vhat, opt)
            t[i] += 1
            fresh[i] = True
            for j in range(4):
                g = grads[s, i, j]
                m[i][j] = 0.8 * m[i][j] + (1 - 0.8) * g
                v[i][j] = 0.9 * v[i][j] + (1 - 0.9) * g ** 2
                c = v[i][j] / (1 - 0.9 ** t[i]) if bias_correction else v[i][j]
                top = m[i][j] / (1 - 0.8 ** t[i]) if bias_correction else m[i][j]
                d = c if vhat is None else max(c, vhat[j]) if guard else vhat[j]
                x[i][j] -= 0.05 * top / (math.sqrt(d) + 1e-3)
        if (s + 1) % 3 == 0:
            merge.after_step(s + 1, last=True)
            active = [i for i in range(3) if fresh[i]]
            assert s != 5 or active == [0, 1]
            new = []
            for j in range(4):
                cs = [v[i][j] / (1 - 0.9 ** t[i]) if bias_correction else v[i][j] for i in active]
                cbar = sum(cs) / len(active)
                new.append(max(vhat[j], cbar) if mode == "amsgrad" and vhat is not None else cbar)
                mean = sum(x[i][j] for i in active) / len(active)
                for i in range(3):
                    x[i][j] = mean
            vhat, fresh = new, [False] * 3
            np.testing.assert_allclose(merge.vhat, vhat, rtol=0, atol=1e-14)
    for i in range(3):
        np.testing.assert_allclose(workers[i].x, x[i], rtol=0, atol=1e-14)
        np.testing.assert_allclose(workers[i].m, m[i], rtol=0, atol=1e-14)
        np.testing.assert_allclose(workers[i].v, v[i], rtol=0, atol=1e-14)
        assert workers[i].t == t[i]


@pytest.mark.parametrize("replica", ["world", "rank", [[0, 2], [1, 3]]])
def test_final_merge_and_a_worker_without_data(replica):
    """After the last step all workers have the same bits; one without data has stepped never and weighed
    nothing.
    """
    batches = by_step(rank_batches("starved", 4, 11, 5, seed=8))
    got = run(batches, [6], replica=replica, k=4, k_rows=3)
    for worker in got.dense:
        np.testing.assert_array_equal(worker["x"], got.dense[0]["x"])
    assert got.dense[3]["t"] == 0 and not got.dense[3]["m"].any() and not got.dense[3]["v"].any()
    assert got.dense_merges == 3                            # 4, 8, and the end at 11
    assert np.isnan(got.losses[:, 3]).all() and np.isfinite(got.losses[:, :3]).all()
    three = run([row[:3] for row in batches], [6], k=4, k_rows=3,
                replica=replica if isinstance(replica, str) else [[0, 2], [1]])
    np.testing.assert_array_equal(got.dense[0]["x"], three.dense[0]["x"])
    assert got.row_merges == (0 if replica == "world" else 4)       # 3, 6 (also a pass end), 9, 11


# ---------------------------------------------------------------- the rest


def test_float32_stays_float32_and_close_to_float64():
    batches = by_step(rank_batches("uneven", 4, 30, 8, seed=16))
    single = run(batches, [12, 24], replica="rank", dtype="float32", k=3, k_rows=4)
    double = run(batches, [12, 24], replica="rank", dtype="float64", k=3, k_rows=4)
    assert single.dense[0]["x"].dtype == single.vhat.dtype == np.float32
    assert all(x.dtype == s.dtype == np.float32 for x, s, _ in single.rows[-1].values())
    np.testing.assert_allclose(single.losses, double.losses, rtol=0, atol=1e-4)


def test_same_bits_twice_and_learns():
    batches = by_step(rank_batches("even", 4, 60, 16, seed=17))
    a = run(batches, [20, 40], replica="rank", cls=TinyWideNet, row_lr=0.05, dense_lr=0.01, k_rows=10)
    b = run(batches, [20, 40], replica="rank", cls=TinyWideNet, row_lr=0.05, dense_lr=0.01, k_rows=10)
    np.testing.assert_array_equal(a.losses, b.losses)
    assert_rows_close(a.rows[-1], b.rows[-1], 0.0)
    assert a.losses[-15:].mean() < a.losses[:15].mean() - 0.02


def test_no_steps_and_steps_without_samples():
    opt = oracle.Options(workers=2, dim=DIM)
    nothing = oracle.simulate([], build(), opt, keys_init())
    assert nothing.losses.shape == (0, 2) and nothing.rows == [] and nothing.dense_merges == 0
    empty = oracle.simulate([[Batch.empty(NUM_DENSE)] * 2, [None]], build(), opt, keys_init())
    assert np.isnan(empty.losses).all() and empty.rows == [{}] and empty.dense[0]["t"] == 0


def test_partition_must_cover_every_worker():
    with pytest.raises(ValueError, match="not a partition"):
        oracle.Options(workers=3, replica=[[0], [1]]).groups()
