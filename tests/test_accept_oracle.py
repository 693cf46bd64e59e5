"""Training on MPI ranks equals the serial program over simulated workers, dense parameters and rows, step
by step.

Agreement is asked to 1e-6 in float32 and 1e-12 in float64: absolute on losses and parameters (relative
where they
exceed one), relative to the largest entry on moments. Many settings share one test so that ranks start once.
"""

import importlib.util
import itertools
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent))

import accept_common
import oracle
from accept_common import (
    FIELD_IS_MULTI,
    FIELDS,
    NUM_DENSE,
    by_step,
    concatenate,
    mixed_keys,
    plain_spec,
    random_batch,
    rank_batches,
)
from accept_settings import (
    BUILT_IN,
    CHOICES,
    DIM,
    INIT_SCALE,
    SAMPLES,
    SEED,
    STEPS,
    Setting,
    bad_pass_ends,
    compare,
    compare_rows,
    differs,
    grid,
    merge_settings,
    more_settings,
)

from hpc_ctr.data.batch import Batch

# ---------------------------------------------------------------- the two sides


def field_list():
    """The test's categorical fields as the training loop takes them."""
    from hpc_ctr.data.schema import Field

    return [Field(f"f{i}", multi) for i, multi in enumerate(FIELD_IS_MULTI)]


def job(s: Setting, model: dict | None = None) -> dict:
    """The setting as a job file."""
    return {
        "seed": SEED, "dtype": s.dtype, "device": "cpu", "model": model or {"name": s.model},
        "embedding": {"dim": DIM, "dtype": s.dtype, "optimizer": s.optimizer, "lr": s.row_lr,
                      "beta1": s.betas[0], "beta2": s.betas[1], "eps": s.row_eps, "init_scale": INIT_SCALE},
        "dense": {"lr": s.dense_lr, "beta1": s.betas[0], "beta2": s.betas[1], "eps": s.dense_eps},
        "merge": {"dense": s.dense, "k": s.k, "mode": s.mode, "guard": s.guard,
                  "bias_correction": s.bias_correction, "backend": s.backend, "overlap": s.overlap,
                  "k_start": s.k_start, "grow_steps": s.grow_steps, "warmup_steps": s.warmup_steps,
                  "route": s.route, "dense_workers": s.dense_workers},
        "rows": {"replica": s.replica, "k_rows": s.k_rows, "rule": s.rule, "window": s.window},
        "cluster": {"ranks_per_node": s.ranks_per_node},
        "train": {"batches_per_pass": s.batches_per_pass},
        "storage": {"host_budget": "64MiB"},
    }


def train(s: Setting, mine: list[Batch], comm, model: dict | None = None):
    """Train with the code under test."""
    from hpc_ctr.api import train_batches

    return train_batches(job(s, model), mine, NUM_DENSE, field_list(), comm)


def keys_init(dtype: str, width: int, dim: int):
    """First values of rows as the code under test draws them."""
    from hpc_ctr.embedding.init import init_rows

    return lambda keys: init_rows(keys, SEED, width, dim, INIT_SCALE, dtype)


def reference(s: Setting, per_step, pass_ends, build=None, dim: int = DIM, first_order: bool | None = None,
              lifecycle=None):
    """The same run in the oracle; ``build`` and ``first_order`` are those of the setting's model when left
    out.
    """
    cls = getattr(accept_common, s.model.split(":")[1])
    first_order = cls.first_order if first_order is None else first_order
    workers = len(per_step[0]) if per_step else 1
    nodes = s.nodes(workers)
    opt = oracle.Options(
        workers=workers, replica=nodes if s.replica == "node" else s.replica, window=s.window, overlap=s.overlap,
        k_start=s.k_start, grow_steps=s.grow_steps, warmup_steps=s.warmup_steps,
        dense_groups=nodes if s.dense_workers == "node" else None, dtype=s.dtype, dim=dim,
        first_order=first_order, row_optimizer=s.optimizer, row_lr=s.row_lr, row_betas=s.betas,
        row_eps=s.row_eps, k_rows=s.k_rows, rule=s.rule, dense=s.dense, dense_lr=s.dense_lr,
        dense_betas=s.betas, dense_eps=s.dense_eps, k=s.k, mode=s.mode, guard=s.guard,
        bias_correction=s.bias_correction)
    build = build or (lambda: cls(plain_spec(NUM_DENSE, len(FIELDS), dim, s.dtype)))
    return oracle.simulate(per_step, build, opt, keys_init(s.dtype, opt.width, dim), pass_ends, lifecycle)


def gathered(result, comm):
    """[(losses, dense, rows, pass_ends)] of all ranks on rank 0, None elsewhere."""
    return comm.gather((list(result.losses), result.dense, result.rows(), list(result.pass_ends)), root=0)


def check(settings: list[Setting], comm) -> None:
    """Train with every setting on ``comm`` and compare on rank 0; every rank fails with all that differed."""
    problems = []
    for s in settings:
        per_rank = rank_batches(s.case, comm.size, s.steps, SAMPLES, seed=5)
        try:
            parts = gathered(train(s, per_rank[comm.rank], comm), comm)
        except Exception as error:
            raise AssertionError(f"{comm.size} ranks, {s.name}: {type(error).__name__}: {error}") from error
        if comm.rank == 0:
            per_step = by_step(per_rank)
            ends = parts[0][3]
            found = bad_pass_ends(s, ends, len(per_step), s.replicas(comm.size))
            if not found:
                want = reference(s, per_step, ends)
                if per_step:
                    cls = getattr(accept_common, s.model.split(":")[1])
                    found = compare(s, parts, want, DIM + int(cls.first_order))
                elif any(part[0] for part in parts) or any(len(part[2][0]) for part in parts):
                    found = ["a run without data left losses or rows"]
            problems += [f"{comm.size} ranks, {s.name}: {line}" for line in found]
    problems = comm.bcast(problems, root=0)
    assert not problems, "\n".join(problems)


def without_horovod(settings: list[Setting]) -> list[Setting]:
    """The settings that can run here: Horovod is optional and has to be built."""
    if importlib.util.find_spec("horovod") is not None:
        return settings
    return [s for s in settings if s.backend != "horovod"]


# ---------------------------------------------------------------- tests


def test_grid_covers_every_pair_of_choices():
    settings = [s for ranks in (1, 2, 4) for s in grid(ranks)]
    names = ["replica", "mode", "k", "k_rows", *CHOICES]
    for a, b in itertools.combinations(names, 2):
        seen = {(getattr(s, a), getattr(s, b)) for s in settings}
        wanted = set(itertools.product({getattr(s, a) for s in settings}, {getattr(s, b) for s in settings}))
        wanted -= {p for p in wanted if {a, b} == {"replica", "k_rows"} and "world" in p}
        assert wanted <= seen, (a, b, wanted - seen)


def test_wrong_settings_would_be_seen():
    """The comparison has power: every setting changes the result by far more than the tolerance."""
    s = Setting("rank", case="uneven", dtype="float32", k=3, k_rows=3)
    per_step = by_step(rank_batches(s.case, 4, STEPS, SAMPLES, seed=5))
    ends = [21, 42]

    def as_parts(result):
        rows = result.rows[-1]
        keys = np.array(sorted(rows), np.uint64)
        records = np.array([np.concatenate(rows[k][:2]) for k in keys.tolist()])
        t = np.array([rows[k][2] for k in keys.tolist()])
        owner = ((keys >> np.uint64(54)) * np.uint64(4)) >> np.uint64(10)
        return [(list(result.losses[:, r]), {**result.dense[r], "vhat": result.vhat},
                 (keys[owner == r], records[owner == r], t[owner == r]), result.pass_ends) for r in range(4)]

    want = reference(s, per_step, ends)
    assert compare(s, as_parts(want), want, DIM) == []
    for change in ({"mode": "amsgrad"}, {"k": 20}, {"k_rows": 20}, {"guard": False},
                   {"bias_correction": False}, {"rule": "mean"}, {"rule": "sum"}, {"replica": "world"},
                   {"window": "x"}, {"overlap": True}, {"grow_steps": 5}, {"warmup_steps": 4},
                   {"ranks_per_node": 2, "dense_workers": "node"}, {"ranks_per_node": 2, "replica": "node"}):
        other = reference(Setting(**{**asdict(s), **change}), per_step, ends)
        assert compare(s, as_parts(other), want, DIM, tolerance=2e-5), change


@pytest.mark.parallel([1, 2, 4])
def test_training_equals_the_oracle():
    comm = MPI.COMM_WORLD
    check(without_horovod(grid(comm.size)), comm)


@pytest.mark.parallel([1, 2, 4])
def test_training_equals_the_oracle_in_odd_settings():
    check(without_horovod(more_settings()), MPI.COMM_WORLD)


@pytest.mark.parallel([1, 2, 3, 4])
def test_training_equals_the_oracle_however_it_merges():
    check(without_horovod(merge_settings()), MPI.COMM_WORLD)


@pytest.mark.parallel([1, 2, 4])
def test_built_in_models_equal_the_oracle():
    """The models of the package, from the dense parameters that a run of no steps starts with."""
    from hpc_ctr.models import ModelSpec, TableSpec, build

    comm = MPI.COMM_WORLD
    problems = []
    for options in BUILT_IN:
        s = Setting("rank", case="uneven", steps=24, k=5, k_rows=5)
        rest = {k: v for k, v in options.items() if k != "name"}
        dim = 0 if options["name"] == "lr" else DIM

        def model():
            spec = ModelSpec(NUM_DENSE, [TableSpec("default", [f.name for f in field_list()], dim)], s.dtype)
            built = build(options["name"], spec, rest)
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(torch.from_numpy(first), built.parameters())
            return built

        first = np.array(train(s, [], comm, options).dense["x"], np.float64)
        per_rank = rank_batches(s.case, comm.size, s.steps, SAMPLES, seed=6)
        parts = gathered(train(s, per_rank[comm.rank], comm, options), comm)
        if comm.rank == 0:
            first_order = bool(getattr(model(), "first_order", False))
            want = reference(s, by_step(per_rank), parts[0][3], model, dim, first_order)
            # larger sums in another order: looser than for the tiny model, far below any real difference
            problems += [f"{options['name']}: {line}"
                         for line in compare(s, parts, want, dim + int(first_order), tolerance=1e-10)]
    problems = comm.bcast(problems, root=0)
    assert not problems, "\n".join(problems)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_synchronous_ranks_equal_one_rank_with_their_batches_together(backend):
    """World replica and dense sync: N ranks with stripes of a batch against one rank with the whole, to
    1e-5.
    """
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not built here")
    comm = MPI.COMM_WORLD
    problems = []
    for case, optimizer, dtype in (("even", "adam", "float32"), ("uneven", "rowwise_adagrad", "float32"),
                                   ("holes", "adam", "float64")):
        s = Setting("world", dense="sync", case=case, optimizer=optimizer, dtype=dtype, backend=backend)
        per_rank = rank_batches(case, comm.size, 30, SAMPLES, seed=7)
        parts = gathered(train(s, per_rank[comm.rank], comm), comm)
        if comm.rank == 0:
            whole = [concatenate(row) for row in by_step(per_rank)]
            want = reference(s, [[b] for b in whole], parts[0][3])
            alone = train(Setting(**{**asdict(s), "backend": "mpi"}), whole, MPI.COMM_SELF)
            found = compare(s, [(list(alone.losses), alone.dense, alone.rows(), alone.pass_ends)], want, DIM)
            sizes = np.array([[b.size for b in row] for row in by_step(per_rank)])
            losses = np.nansum(np.array([p[0] for p in parts]).T * sizes, axis=1) / sizes.sum(1)
            found += differs("mean loss", losses, alone.losses, 1e-5)
            for rank, part in enumerate(parts):
                found += differs(f"rank {rank} dense x", part[1]["x"], alone.dense["x"], 1e-5)
            found += compare_rows([p[2] for p in parts], want.rows[-1], DIM, 1e-5)
            problems += [f"{s.name}: {line}" for line in found]
    problems = comm.bcast(problems, root=0)
    assert not problems, "\n".join(problems)


def test_dense_sync_on_one_rank_is_torch_adam():
    """Against torch's own optimizer, without the oracle. Every key is in every batch: row Adam is plain
    Adam too.
    """
    rng = np.random.default_rng(8)
    ids = 3
    count = len(FIELDS)
    batches = []
    for _ in range(25):
        keys = np.concatenate([mixed_keys(f, rng.permutation(np.arange(9) % ids)) for f in range(count)])
        batch = random_batch(rng, 9)
        batches.append(Batch(batch.label, batch.dense, keys, np.arange(count * 9 + 1, dtype=np.int64)))
    s = Setting("world", dense="sync")
    got = train(s, batches, MPI.COMM_SELF)

    all_keys = np.concatenate([mixed_keys(f, np.arange(ids)) for f in range(count)])
    number = {key: i for i, key in enumerate(all_keys.tolist())}
    table = torch.nn.Parameter(torch.from_numpy(keys_init("float64", DIM, DIM)(all_keys)))
    model = accept_common.TinyNet(plain_spec(NUM_DENSE, count, DIM, "float64"))
    optimizer = torch.optim.Adam([{"params": model.parameters(), "lr": s.dense_lr},
                                  {"params": [table], "lr": s.row_lr}])
    losses = []
    for batch in batches:
        at = torch.tensor([number[k] for k in batch.keys.tolist()]).reshape(count, 9).T
        logits = model(torch.from_numpy(batch.dense).double(), (table[at],))
        loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label).double())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert differs("losses", got.losses, losses, 1e-12) == []
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    assert differs("dense x", got.dense["x"], flat, 1e-12) == []
    keys, records, t = got.rows()
    order = [number[k] for k in keys.tolist()]
    assert sorted(order) == list(range(len(all_keys)))
    assert differs("rows x", np.asarray(records)[:, :DIM], table.detach().numpy()[order], 1e-12) == []
    assert set(np.asarray(t).tolist()) == {len(batches)}


@pytest.mark.parallel([1, 2, 4])
def test_same_seed_and_rank_count_give_the_same_bits():
    comm = MPI.COMM_WORLD
    s = Setting("rank", case="uneven", dtype="float32", k=3, k_rows=3)
    mine = rank_batches(s.case, comm.size, STEPS, SAMPLES, seed=9)[comm.rank]
    a, b = train(s, mine, comm), train(s, mine, comm)
    same = np.array_equal(a.losses, b.losses, equal_nan=True) and np.array_equal(a.dense["x"], b.dense["x"])
    rows = [{key: np.array(record).tobytes() for key, record in zip(keys.tolist(), records)}
            for keys, records, _ in (a.rows(), b.rows())]
    verdicts = comm.allgather((same, rows[0] == rows[1]))
    assert all(all(v) for v in verdicts), verdicts
