"""Tables, working sets, the device table on both of its paths, pooling, and several tables trained together."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_common import FIELDS, NUM_DENSE, mixed_keys, random_batch

from hpc_ctr.data.batch import Batch
from hpc_ctr.data.schema import Field
from hpc_ctr.embedding import device_table
from hpc_ctr.embedding.device_table import DeviceTable, pool
from hpc_ctr.embedding.init import init_rows
from hpc_ctr.embedding.table import EmbeddingOptions, Table, make_tables
from hpc_ctr.embedding.working_set import make_working_set, table_keys
from hpc_ctr.errors import UsageError
from hpc_ctr.models import ModelSpec, TableSpec

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
CPU = torch.device("cpu")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def there(name: str) -> torch.device:
    """The device; skips where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(name)


def table(dim=4, first_order=True, dtype="float64", optimizer="adam", fields=(0, 1, 2, 3), beta1=0.9) -> Table:
    return Table("t", tuple(fields), dim, first_order, np.dtype(dtype), optimizer, 0.05, beta1, 0.99, 1e-6, 0.1)


# ---------------------------------------------------------------- device table


def device_pair(t: Table, rows: int, device: torch.device, rng) -> tuple[DeviceTable, DeviceTable]:
    """The same rows in a table on the numba path and in one on the torch path of ``device``."""
    records = np.abs(rng.normal(size=(rows, t.floats))).astype(t.dtype)
    steps = rng.integers(0, 2000, rows).astype(np.uint32)
    host = DeviceTable(t, records.copy(), steps.copy(), CPU)
    other = DeviceTable(t, records.copy(), steps.copy(), device)
    other.on_host = False
    return host, other


def same(a: DeviceTable, b: DeviceTable, dtype: str) -> None:
    """Both hold the same rows, up to rounding, and the same step counts."""
    (x, t), (y, u) = a.read(slice(None)), b.read(slice(None))
    assert t.dtype == u.dtype == np.uint32 and np.array_equal(t, u)
    assert x.dtype == y.dtype == np.dtype(dtype)
    assert np.allclose(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DEVICES
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize("dim, first_order", [(5, True), (1, False), (0, True)])
def test_torch_path_equals_the_numba_path(dim, first_order, optimizer, dtype, device):
    rng = np.random.default_rng(dim)
    t = table(dim, first_order, dtype, optimizer)
    host, other = device_pair(t, 9, there(device), rng)
    for n in (0, 1, 20, 7):
        slots = rng.integers(0, 9, n).astype(np.int32)  # with repetitions
        grads = torch.from_numpy(rng.normal(size=(n, t.width)).astype(dtype))
        host.step(slots, grads)
        other.step(slots, grads.to(other.device))
        same(host, other, dtype)
        values = other.values(slots)
        assert values.shape == (n, t.width) and values.device.type == device
        assert np.allclose(host.values(slots).numpy(), values.cpu().numpy(), rtol=TOLERANCE[dtype], atol=1e-5)


@DEVICES
def test_whole_records_are_read_and_written(device):
    rng = np.random.default_rng(1)
    t = table(dtype="float32")
    for rows in device_pair(t, 6, there(device), rng):
        before, steps = (a.copy() for a in rows.read(slice(None)))
        slots = np.array([4, 1], np.int32)
        records, counts = rng.normal(size=(2, t.floats)).astype(np.float32), np.array([2**31 - 1, 7], np.uint32)
        rows.write(slots, records, counts)
        got, got_t = rows.read(slots)
        assert np.array_equal(got, records) and np.array_equal(got_t, counts)
        rest = np.setdiff1d(np.arange(6), slots)
        assert np.array_equal(rows.read(rest)[0], before[rest]) and np.array_equal(rows.read(rest)[1], steps[rest])
        rows.write(slots[:0], records[:0], counts[:0])
        assert rows.read(slots[:0])[0].shape == (0, t.floats)


@DEVICES
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adam_of_both_paths_is_torch_adam_from_fresh_rows(beta1, device):
    """Every row in every step: then row Adam is torch.optim.Adam on the whole table."""
    rng = np.random.default_rng(2)
    t = table(3, False, beta1=beta1)
    first = rng.normal(size=(5, 3))
    whole = torch.nn.Parameter(torch.from_numpy(first.copy()))
    adam = torch.optim.Adam([whole], t.lr, (t.beta1, t.beta2), t.eps)
    ours = []
    for on_host in (True, False):
        records = np.concatenate([first, np.zeros((5, 6))], 1)
        ours.append(DeviceTable(t, records, np.zeros(5, np.uint32), CPU if on_host else there(device)))
        ours[-1].on_host = on_host
    for _ in range(40):
        grads = torch.from_numpy(rng.normal(size=(5, 3)))
        whole.grad = grads
        adam.step()
        for rows in ours:
            order = rng.permutation(5).astype(np.int32)
            rows.step(order, grads[torch.from_numpy(order.astype(np.int64))].to(rows.device))
    for rows in ours:
        assert np.allclose(rows.read(slice(None))[0][:, :3], whole.detach().numpy(), atol=1e-12)


# ---------------------------------------------------------------- pooling


def bags_of(rng, fields, batch, values):
    """Random bags, some empty: index int32 [nnz] and offsets int64 [fields*batch+1]."""
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, fields * batch))]).astype(np.int64)
    return rng.integers(0, values, int(offsets[-1])).astype(np.int32), offsets


def pool_with_torch(monkeypatch, values, *bags):
    """``pool`` by torch operations: the first time that it asks, ``values`` is not in host memory."""
    real = torch.Tensor.device.__get__
    asked = iter([torch.device("meta")])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(lambda tensor: next(asked, None) or real(tensor)))
        return pool(values, *bags)


@pytest.mark.parametrize("fields, batch, dim, first_order", [
    (3, 4, 2, True), (3, 4, 2, False), (1, 1, 5, True), (2, 3, 0, True), (2, 0, 3, True), (2, 0, 3, False)])
def test_pool_on_both_paths_and_by_gradcheck(fields, batch, dim, first_order, monkeypatch):
    rng = np.random.default_rng(fields)
    bags = (*bags_of(rng, fields, batch, 6), fields, batch, dim)
    values = torch.from_numpy(rng.normal(size=(6, dim + first_order))).requires_grad_()
    results, grads = [], []
    weights = None
    for path in (pool, lambda *args: pool_with_torch(monkeypatch, *args)):
        vectors, first = path(values, *bags)
        assert vectors.shape == (batch, fields, dim)
        assert first.shape == ((batch, fields) if first_order else (0, 0))
        weights = weights or [torch.from_numpy(rng.normal(size=part.shape)) for part in (vectors, first)]
        loss = sum((part * weight).sum() for part, weight in zip((vectors, first), weights))
        results.append((vectors.detach(), first.detach()))
        grads.append(torch.autograd.grad(loss, values)[0])
        if batch:
            used = [0, 1] if first_order and dim else [1] if first_order else [0]
            assert torch.autograd.gradcheck(lambda v, path=path, used=used: tuple(path(v, *bags)[i] for i in used),
                                            values)
    for a, b in zip(*results):
        assert torch.allclose(a, b, atol=1e-14)
    assert torch.allclose(*grads, atol=1e-13)


@pytest.mark.gpu
def test_pool_on_a_gpu():
    device = there("cuda")
    rng = np.random.default_rng(4)
    bags = (*bags_of(rng, 3, 5, 8), 3, 5, 2)
    values = torch.from_numpy(rng.normal(size=(8, 3))).requires_grad_()
    over = values.detach().to(device).requires_grad_()
    for a, b in zip(pool(values, *bags), pool(over, *bags)):
        assert torch.allclose(a, b.cpu(), atol=1e-13)
    for each in (values, over):
        vectors, first = pool(each, *bags)
        ((vectors ** 2).sum() + first.sin().sum()).backward()
    assert torch.allclose(values.grad, over.grad.cpu(), atol=1e-12)


# ---------------------------------------------------------------- tables


NAMES = ["user", "item", "genre", "hour"]


def made(*entries, vectors=True, first_order=True, **more) -> list[Table]:
    """The tables of these options, checked as a job file's are."""
    options = EmbeddingOptions(tables=list(entries), **more)
    options.check()
    return make_tables(options, NAMES, first_order, vectors)


def test_fields_that_no_table_names_form_the_default_in_schema_order():
    tables = made({"name": "small", "fields": ["hour", "item"], "dim": 2, "optimizer": "rowwise_adagrad"}, dim=8)
    assert [(t.name, t.fields, t.dim, t.optimizer) for t in tables] == [
        ("default", (0, 2), 8, "adam"), ("small", (1, 3), 2, "rowwise_adagrad")]
    default, small = tables
    assert (default.width, default.state_width, default.floats) == (9, 18, 27)
    assert (small.width, small.state_width, small.floats) == (3, 1, 4)


def test_numbers_that_yaml_reads_as_text():
    assert made({"name": "a", "fields": ["user"], "lr": "1e-3", "eps": "1e-6"})[1].lr == 1e-3
    with pytest.raises(UsageError, match=r"embedding\.tables\[0\]\.lr"):
        made({"name": "a", "fields": ["user"], "lr": "fast"})


def test_no_default_where_every_field_has_a_table_and_no_vectors_where_none_are_wanted():
    tables = made({"name": "a", "fields": ["user", "item"]}, {"name": "b", "fields": ["genre", "hour"]}, vectors=False)
    assert [(t.name, t.dim, t.width) for t in tables] == [("a", 0, 1), ("b", 0, 1)]
    assert [t.name for t in made()] == ["default"]


@pytest.mark.parametrize("entries, said", [
    ([{"name": "a", "fields": ["usr"]}], ["embedding.tables[0].fields", "'usr'", "did you mean user"]),
    ([{"name": "a", "fields": ["zzzz"]}], ["embedding.tables[0].fields", "'zzzz'", "user, item, genre, hour"]),
    ([{"name": "a", "fields": ["user"]}, {"name": "b", "fields": ["item", "user"]}],
     ["embedding.tables[1].fields", "'user'", "'a'"]),
    ([{"name": "a", "fields": ["user", "user"]}], ["embedding.tables[0].fields", "'user'"]),
    ([{"name": "a", "fields": []}], ["embedding.tables[0].fields"]),
    ([{"name": "a", "fields": [["user"]]}], ["embedding.tables[0].fields"]),
    ([{"name": "a", "fields": ["user"], "optimiser": "adam"}],
     ["embedding.tables[0].optimiser", "did you mean optimizer"]),
    ([{"name": "a", "fields": ["user"], "qqq": 1}], ["embedding.tables[0].qqq", "init_scale"]),
    ([{"name": "a", "fields": ["user"], "tables": []}], ["embedding.tables[0].tables"]),
    ([{"name": "a", "fields": ["user"], "dim": 0}], ["embedding.tables[0].dim", "0"]),
    ([{"name": "a", "fields": ["user"], "dim": True}], ["embedding.tables[0].dim", "True"]),
    ([{"name": "a", "fields": ["user"], "optimizer": "sgd"}], ["embedding.tables[0].optimizer", "'sgd'"]),
    ([{"name": "a", "fields": ["user"], "beta2": 1}], ["embedding.tables[0].beta2"]),
    ([{"name": "a", "fields": ["user"], "lr": float("nan")}], ["embedding.tables[0].lr"]),
    ([{"name": "a", "fields": ["user"], "dtype": "float16"}], ["embedding.tables[0].dtype", "'float16'"]),
    ([{"name": "a", "fields": ["user"]}, {"name": "a", "fields": ["item"]}], ["embedding.tables[1].name", "'a'"]),
    ([{"name": "default", "fields": ["user"]}], ["embedding.tables[0].name", "'default'"]),
    ([{"name": "../a", "fields": ["user"]}], ["embedding.tables[0].name", "'../a'"]),
    ([{"name": 7, "fields": ["user"]}], ["embedding.tables[0].name", "7"]),
    ([{"name": "", "fields": ["user"]}], ["embedding.tables[0].name"]),
    ([{"fields": ["user"]}], ["embedding.tables[0]", "name"]),
    ([{"name": "a", "fields": "user"}], ["embedding.tables[0]", "fields"]),
    (["a"], ["embedding.tables[0]"]),
])
def test_mistakes_in_tables_name_the_setting(entries, said):
    with pytest.raises(UsageError) as caught:
        made(*entries)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- working set


def bag_contents(keys, offsets) -> list[list[int]]:
    """Keys of each bag."""
    return [part.tolist() for part in np.split(keys, offsets[1:-1])]


@pytest.mark.parametrize("homes", [1, 2, 5])
@pytest.mark.parametrize("fields", [(0, 1, 2, 3), (1, 3), (3,)])
def test_working_set(fields, homes):
    rng = np.random.default_rng(homes)
    batches = [random_batch(rng, 12), Batch.empty(NUM_DENSE), random_batch(rng, 1, empty_field=True),
               random_batch(rng, 30)]
    t = table(fields=fields)

    def home_of(keys):
        return (keys % np.uint64(homes)).astype(np.int64)

    got = make_working_set(t, batches, home_of, homes)
    expected = [[bag for f in fields for bag in bag_contents(b.keys, b.offsets)[f * b.size:(f + 1) * b.size]]
                for b in batches]
    wanted = {key for step in expected for bag in step for key in bag}
    assert len(got.keys) == len(wanted) and set(got.keys.tolist()) == wanted
    home = home_of(got.keys)
    assert (np.diff(home) >= 0).all() and np.array_equal(np.bincount(home, minlength=homes), got.home_counts)
    for step, batch in enumerate(batches):
        need, bags = got.needs[step], got.bags[step]
        assert need.dtype == bags.index.dtype == np.int32 and bags.offsets.dtype == np.int64
        assert len(np.unique(need)) == len(need)
        at_home = home_of(got.keys[need])
        assert (np.diff(at_home) >= 0).all()
        assert np.array_equal(np.bincount(at_home, minlength=homes), got.need_counts[step])
        assert bag_contents(got.keys[need][bags.index], bags.offsets) == expected[step] or batch.size == 0
        assert len(bags.offsets) == len(fields) * batch.size + 1
        keys, offsets = table_keys(batch, t)
        assert np.array_equal(keys, got.keys[need][bags.index]) and np.array_equal(offsets, bags.offsets)


def test_working_set_of_nothing():
    for batches in ([], [Batch.empty(NUM_DENSE)]):
        got = make_working_set(table(), batches, lambda keys: np.zeros(len(keys), np.int64), 3)
        assert len(got.keys) == 0 and got.home_counts.tolist() == [0, 0, 0] and got.home_counts.dtype == np.int64
        assert got.need_counts.shape == (len(batches), 3) and not got.need_counts.any()
        assert [len(need) for need in got.needs] == [0] * len(batches)


# ---------------------------------------------------------------- several tables, trained


class TwoWidths(torch.nn.Module):
    """Smooth in everything; takes tables of different dims; its first values come from its own seed."""

    first_order = True

    def __init__(self, spec):
        super().__init__()
        rng = np.random.default_rng(11)
        floats = spec.num_dense + sum(len(t.fields) * t.dim for t in spec.tables)
        self.weight = torch.nn.Parameter(torch.from_numpy(rng.normal(0, 0.4, (floats, 4))).to(spec.dtype))

    def forward(self, dense, vectors, first):
        """Logits [B]; first-order weights [B, F] come in the schema's order, each with a factor of its own."""
        inputs = torch.cat([dense, *(part.flatten(1) for part in vectors)], 1)
        return torch.tanh(inputs @ self.weight).sum(1) + first @ torch.arange(1.0, first.shape[1] + 1).to(first)


NUM_IDS = 3
OTHERS = {"name": "wide", "fields": ["f1", "f3"], "dim": 5, "optimizer": "rowwise_adagrad", "lr": 0.02,
          "init_scale": 0.5}


def full_batches(steps: int) -> list[Batch]:
    """Batches of single-valued fields, in each of which every id of every field occurs."""
    rng = np.random.default_rng(6)
    out = []
    for _ in range(steps):
        keys = [mixed_keys(f, rng.permutation(np.arange(9) % NUM_IDS)) for f in range(len(FIELDS))]
        batch = random_batch(rng, 9)
        offsets = np.arange(9 * len(FIELDS) + 1, dtype=np.int64)
        out.append(Batch(batch.label, batch.dense, np.concatenate(keys), offsets))
    return out


def trained(batches, model, tables, **more):
    """``train_batches`` on this rank alone, in float64."""
    from mpi4py import MPI

    from hpc_ctr.api import train_batches

    config = {"seed": 3, "dtype": "float64", "device": "cpu", "model": {"name": model},
              "embedding": {"dim": 2, "dtype": "float64", "lr": 0.03, "init_scale": 0.2, "tables": tables, **more},
              "dense": {"lr": 0.01}, "merge": {"dense": "sync", "backend": "mpi"},
              "train": {"batches_per_pass": 7}, "storage": {"host_budget": "64MiB"}}
    fields = [Field(f"f{i}", False) for i in range(len(FIELDS))]
    return train_batches(config, batches, NUM_DENSE, fields, MPI.COMM_SELF)


def test_tables_of_different_dim_and_optimizer_equal_plain_torch():
    batches = full_batches(20)
    got = trained(batches, "test_embedding:TwoWidths", [OTHERS])

    groups = [((0, 2), 2, 0.2), ((1, 3), 5, 0.5)]
    keys = [np.concatenate([mixed_keys(f, np.arange(NUM_IDS)) for f in fields]) for fields, _, _ in groups]
    weights = [torch.nn.Parameter(torch.from_numpy(init_rows(k, 3, dim + 1, dim, scale, np.float64)))
               for k, (_, dim, scale) in zip(keys, groups)]

    spec = ModelSpec(NUM_DENSE, [TableSpec("t", fields, dim) for fields, dim, _ in groups], torch.float64)
    model = TwoWidths(spec)
    adam = torch.optim.Adam([{"params": model.parameters(), "lr": 0.01}, {"params": [weights[0]], "lr": 0.03}])
    total, losses = torch.zeros(len(keys[1]), dtype=torch.float64), []
    for batch in batches:
        vectors, first = [], torch.zeros((9, len(FIELDS)), dtype=torch.float64)
        for (fields, dim, _), k, weight in zip(groups, keys, weights):
            number = {key: i for i, key in enumerate(k.tolist())}
            at = torch.tensor([[number[key] for key in batch.keys[9 * f:9 * f + 9].tolist()] for f in fields]).T
            vectors.append(weight[at][..., :dim])
            first = first.index_copy(1, torch.tensor(fields), weight[at][..., dim])
        logits = model(torch.from_numpy(batch.dense).double(), tuple(vectors), first)
        loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label).double())
        losses.append(loss.item())
        adam.zero_grad()
        weights[1].grad = None
        loss.backward()
        adam.step()
        with torch.no_grad():
            grad = weights[1].grad
            total += grad.square().mean(1)
            weights[1] -= 0.02 / (total.sqrt() + 1e-8)[:, None] * grad

    assert np.allclose(got.losses, losses, atol=1e-12)
    assert np.allclose(got.dense["x"], model.weight.detach().numpy().ravel(), atol=1e-12)
    for number, (k, weight) in enumerate(zip(keys, weights)):
        found, records, t = got.rows(number)
        place = [k.tolist().index(key) for key in found.tolist()]
        assert sorted(place) == list(range(len(k))) and set(t.tolist()) == {20}
        assert np.allclose(records[:, :weight.shape[1]], weight.detach().numpy()[place], atol=1e-12)
    assert np.allclose(records[:, 6], total.numpy()[place])  # the accumulators of the second table


@pytest.mark.parametrize("model", ["lr", "dnn", "deepfm"])
def test_how_fields_are_split_into_like_tables_does_not_matter(model):
    """Two tables with the same settings train as one: the fields keep their order where it counts."""
    rng = np.random.default_rng(9)
    batches = [random_batch(rng, 16) for _ in range(10)]
    # the last fields apart, so that the vectors of both tables in a row are in the schema's order
    one, two = (trained(batches, model, tables) for tables in ([], [{"name": "b", "fields": ["f2", "f3"]}]))
    assert np.allclose(one.losses, two.losses, atol=1e-10)
    rows = {key: record for part in (0, 1) for key, record in zip(two.rows(part)[0].tolist(), two.rows(part)[1])}
    keys, records, _ = one.rows()
    assert len(rows) == len(keys)
    assert all(np.allclose(rows[key], record, atol=1e-9) for key, record in zip(keys.tolist(), records))


def test_device_tables_are_used_for_what_they_say(monkeypatch):
    """Training with the torch path forced gives what the numba path gives, through the whole loop."""
    batches = full_batches(15)
    want = trained(batches, "test_embedding:TwoWidths", [OTHERS])
    real = DeviceTable.__init__

    def elsewhere(self, *args):
        real(self, *args)
        self.on_host = False

    monkeypatch.setattr(device_table.DeviceTable, "__init__", elsewhere)
    got = trained(batches, "test_embedding:TwoWidths", [OTHERS])
    assert np.allclose(got.losses, want.losses, atol=1e-11)
    for number in (0, 1):
        assert np.allclose(got.rows(number)[1], want.rows(number)[1], atol=1e-10)
