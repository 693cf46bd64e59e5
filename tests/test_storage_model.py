"""TieredStore against a plain dict: whatever is done to it, it holds the same rows, bit for bit."""

import os
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs
from hpc_ctr.storage.cold import ColdStoreOptions
from hpc_ctr.storage.host_cache import FLOOR_ROWS
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.tiered import TieredStore, budget_for

LAST_KEY = 2**64 - 1
UNIVERSE = 6500
CACHED = 66             # a hundredth of the rows
OPERATIONS = 100_000    # random ones, over all layouts
LAYOUTS = [RecordLayout(4, 8), RecordLayout(1, 0), RecordLayout(17, 34), RecordLayout(0, 3),
           RecordLayout(3, 2, np.float64), RecordLayout(5, 0, np.float64)]
# small limits, so that some hundred rows already take many segments, reads and rewrites
SMALL = ColdStoreOptions(gap_bytes=256, read_bytes=2048, threads=3, max_segments=8, output_rows=1500)
# of 100 operations
SHARES = {"get": 33, "put": 25, "update": 25, "set_budget": 8, "flush": 6, "compact": 1, "reopen": 1, "lose": 1}


def name_of(value):
    """For pytest's output."""
    return value.describe().replace(" ", "") if isinstance(value, RecordLayout) else str(value)


def random_rows(rng, n, layout):
    """Records of random bits (so NaN, infinities and subnormal numbers too) and random step counts."""
    words = rng.integers(0, 2**32, (n, layout.words), dtype=np.uint32)
    return words.view(layout.dtype), rng.integers(0, 2**32, n, dtype=np.uint32)


def as_dict(keys, records, t):
    """key -> (bytes of the record, t)."""
    return {int(k): (r.tobytes(), int(s)) for k, r, s in zip(keys, records, t, strict=True)}


def keys_of(values):
    """Python integers as a key array."""
    return np.array(list(values), np.uint64)


def read(store, keys):
    """(found, records, t) of a get into arrays that were filled with a pattern."""
    records = np.full((len(keys), store.layout.words), 0xA5A5A5A5, np.uint32).view(store.layout.dtype)
    t = np.full(len(keys), 77, np.uint32)
    return store.get(keys, records, t), records, t


def everything(store, batch_rows=100):
    """All rows by ``iterate``, each of which must come once."""
    rows, seen = {}, 0
    for keys, records, t in store.iterate(batch_rows):
        assert 0 < len(keys) <= batch_rows
        rows.update(as_dict(keys, records, t))
        seen += len(keys)
    assert seen == len(rows), "iterate gave a row twice"
    return rows


class Model:
    """A store, the dict that it must equal, and what each row has been since the last commit of all rows."""

    def __init__(self, directory, layout):
        self.directory, self.layout = str(directory), layout
        self.rng = np.random.default_rng(0)
        self.keys = np.unique(self.rng.integers(0, 2**64, UNIVERSE, dtype=np.uint64))
        # the smallest and the largest key, and some that collide in the low bits that the cache's index uses
        self.keys = np.concatenate([self.keys, keys_of([0, LAST_KEY] + [(i << 32) + 5 for i in range(1, 9)])])
        self.large = budget_for(layout, 3 * CACHED, len(self.keys))
        self.small = budget_for(layout, CACHED, len(self.keys))
        self.rows, self.history = {}, {}
        self.cold_hits = self.evicted = self.rewritten = 0
        self.store = self.open(self.small)
        self.write(self.rng.permutation(self.keys)[:UNIVERSE])
        self.flush()
        assert self.store.cache.capacity <= len(self.rows) // 90

    def open(self, budget):
        """The store as a new process would see it."""
        return TieredStore(self.directory, self.layout, budget, options=SMALL)

    def some_keys(self):
        """Distinct keys: none, a few, or more than the cache holds; often those of a small hot set."""
        n = int(self.rng.choice([0, 1, 3, 8, 30, 3 * CACHED], p=[.04, .3, .3, .26, .08, .02]))
        pool = self.keys[::90] if n < 40 and self.rng.random() < .5 else self.keys
        return self.rng.choice(pool, n, replace=False, shuffle=False)

    def write(self, keys):
        """Put random rows."""
        records, t = random_rows(self.rng, len(keys), self.layout)
        for key, row in as_dict(keys, records, t).items():
            self.history.setdefault(key, [self.rows.get(key)]).append(row)
            self.rows[key] = row
        self.store.put(keys, records, t)

    def put(self):
        """Write some rows."""
        self.write(self.some_keys())

    def get(self):
        """Read some rows, known and unknown ones."""
        keys = self.some_keys()
        found, records, t = read(self.store, keys)
        assert found.tolist() == [int(k) in self.rows for k in keys]
        assert as_dict(keys[found], records[found], t[found]) == {int(k): self.rows[int(k)] for k in keys[found]}
        assert (records[~found].view(np.uint32) == 0xA5A5A5A5).all() and (t[~found] == 77).all()

    def update(self):
        """What training does: a get, then a put of the same keys, new ones among them."""
        keys = self.some_keys()
        read(self.store, keys)
        self.write(keys)

    def flush(self):
        """Commit all rows."""
        self.store.flush()
        self.history = {}

    def set_budget(self):
        """Shrink or enlarge the cache."""
        self.store.set_budget(int(self.rng.integers(self.small, self.large)))

    def compact(self):
        """Rewrite all segments that have stale rows."""
        self.store.cold.compact()
        assert all(s.live == s.rows for s in self.store.segments())

    def close(self):
        """Close the store and keep its counters."""
        counters = self.store.counters()
        self.cold_hits += counters.cold_hits
        self.evicted += counters.rows_evicted
        self.rewritten += self.store.cold.counters.rows_compacted
        self.store.close()

    def reopen(self):
        """Flush, close and open: nothing is lost."""
        self.flush()
        self.close()
        self.store = self.open(self.store.budget)

    def lose(self):
        """Close without a flush: each row is what it was at the last flush, or what it was later."""
        self.close()
        self.store = self.open(self.store.budget)
        present = everything(self.store)
        for key in set(self.rows) | set(present):
            allowed = self.history.get(key, [self.rows.get(key)])
            assert present.get(key) in allowed
        self.rows, self.history = present, {}

    def check(self):
        """What must hold after every operation."""
        assert self.store.nbytes <= self.store.budget
        assert self.store.cache.count <= self.store.cache.capacity

    def check_all(self):
        """The whole table."""
        assert self.store.rows == len(self.store) == len(self.rows)
        assert everything(self.store) == self.rows
        assert self.store.verify() == []


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Durability is not what these tests are about."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_random_operations_equal_a_dict(tmp_path, monkeypatch, layout):
    """Any mix of operations, with one row of a hundred in the cache. The failing list of operations is printed, and
    comes again on every run; add Phase.shrink to have it made short, which takes minutes."""
    if layout != LAYOUTS[1]:    # one of them reads around the page cache; for the others a busy disk would be waiting
        monkeypatch.setattr(fs, "open_direct", lambda path: -1)
    done = np.zeros(4, np.int64)    # operations, cold hits, evicted rows, rows that compaction moved

    # what is drawn depends on what else is imported: enough lists for any draw, and no more operations than wanted
    @settings(max_examples=OPERATIONS // len(LAYOUTS) // 100, derandomize=True, database=None, deadline=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.sampled_from([name for name, n in SHARES.items() for _ in range(n)]),
                              st.integers(0, 2**16)), min_size=200, max_size=400))
    def run(operations):
        nonlocal done
        if done[0] >= OPERATIONS // len(LAYOUTS):
            return
        with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
            model = Model(directory, layout)
            for name, seed in operations:
                model.rng = np.random.default_rng(seed)
                getattr(model, name)()
                model.check()
            model.check_all()
            model.reopen()
            model.check_all()
            model.close()
        done += np.array([len(operations), model.cold_hits, model.evicted, model.rewritten])

    run()
    assert done[0] >= OPERATIONS // len(LAYOUTS) and (done[1:] > done[0]).all(), done


def test_known_rows_do_not_count_as_new(tmp_path):
    """Rows put again without a get before are not taken for additional rows, for which there is no room."""
    layout, keys = RecordLayout(1, 0), np.arange(900, dtype=np.uint64)
    rng = np.random.default_rng(8)
    with TieredStore(str(tmp_path / "store"), layout, budget_for(layout, CACHED, 900), options=SMALL) as store:
        capacity = store.cache.capacity
        for _ in range(3):
            keys = rng.permutation(keys)
            records, t = random_rows(rng, 900, layout)
            store.put(keys, records, t)
            assert store.rows == 900 and store.nbytes <= store.budget
        assert everything(store) == as_dict(keys, records, t)
        assert FLOOR_ROWS < store.cache.capacity <= capacity


@pytest.fixture
def layout():
    return RecordLayout(4, 8)


@pytest.fixture
def store(tmp_path, layout):
    with TieredStore(str(tmp_path / "store"), layout, budget_for(layout, CACHED, 1000), options=SMALL) as store:
        yield store


def test_put_larger_than_the_cache(store, layout):
    """What the cache cannot take goes to the cold tier at once, and comes back."""
    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(0, 2**64, 900, dtype=np.uint64))
    records, t = random_rows(rng, len(keys), layout)
    store.put(keys, records, t)
    assert store.counters().segments_written > 0 and store.cache.count <= store.cache.capacity < len(keys)
    found, back, back_t = read(store, keys)
    assert found.all() and back.tobytes() == records.tobytes() and back_t.tobytes() == t.tobytes()
    counters = store.counters()
    assert counters.host_hits + counters.cold_hits == len(keys) and counters.host_hits and counters.cold_hits
    assert counters.bytes_read >= counters.cold_hits * layout.stored_bytes
    assert counters.bytes_written >= counters.cold_hits * layout.stored_bytes


def test_get_creates_nothing(store, layout):
    """Rows that are not there are not made, and the caller's arrays keep what they held."""
    keys = keys_of([0, 1, LAST_KEY])
    found, records, t = read(store, keys)
    assert not found.any() and store.rows == 0 and everything(store) == {}
    assert (records.view(np.uint32) == 0xA5A5A5A5).all() and (t == 77).all()
    assert store.counters().missing == 3 and store.segments() == []


def test_empty_batches(store, layout):
    """Empty batches are allowed everywhere."""
    nothing = np.empty(0, np.uint64)
    records, t = np.empty((0, layout.floats), np.float32), np.empty(0, np.uint32)
    store.put(nothing, records, t)
    assert store.get(nothing, records, t).shape == (0,)
    store.flush()
    assert store.rows == 0 and store.segments() == []


def test_flush_leaves_rows_in_the_cache(store, layout):
    """After a flush rows are committed, and served from memory all the same."""
    rng = np.random.default_rng(4)
    records, t = random_rows(rng, 20, layout)
    store.put(np.arange(20, dtype=np.uint64), records, t)
    store.flush()
    assert store.counters().segments_written == 1 and sum(s.live for s in store.segments()) == 20
    read(store, np.arange(20, dtype=np.uint64))
    assert store.counters().host_hits == 20 and store.counters().cold_hits == 0
    store.flush()
    assert store.counters().segments_written == 1, "nothing was dirty"


def test_eviction_of_clean_rows_writes_nothing(store, layout):
    """Rows that were read and not changed leave the cache without a segment."""
    rng = np.random.default_rng(5)
    keys = rng.permutation(800).astype(np.uint64)
    store.put(keys, *random_rows(rng, len(keys), layout))
    store.flush()
    written = store.counters().segments_written
    # rows of the cache are given up when they have not been used for some passes
    for turn in range(40):
        begin = 400 + turn % 8 * 50
        assert read(store, keys[begin:begin + 50])[0].all()
    assert store.counters().segments_written == written and store.counters().rows_evicted > 0


def test_rows_that_are_not_contiguous(store, layout):
    """A strided view of records is written and read like any other array."""
    rng = np.random.default_rng(6)
    keys = np.arange(10, dtype=np.uint64)
    wide, t = rng.random((10, 2 * layout.floats)).astype(np.float32), np.arange(10, dtype=np.uint32)
    store.put(keys, wide[:, ::2], t)
    back = np.zeros_like(wide)
    assert store.get(keys, back[:, ::2], t).all()
    assert (back[:, ::2] == wide[:, ::2]).all() and not back[:, 1::2].any()


def test_wrong_arrays_are_refused(store, layout):
    """Keys and records of another type or shape raise before anything is changed."""
    keys, t = np.arange(2, dtype=np.uint64), np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match="keys must be uint64"):
        store.put(keys.astype(np.int64), np.zeros((2, 12), np.float32), t)
    with pytest.raises(ValueError, match="records must be float32"):
        store.put(keys, np.zeros((2, 12)), t)
    with pytest.raises(ValueError, match="records must be float32"):
        store.get(keys, np.zeros((2, 11), np.float32), t)
    with pytest.raises(ValueError, match="distinct"):
        store.put(keys_of([5, 5]), np.zeros((2, 12), np.float32), t)
    assert store.rows == 0


def test_budget_too_small_is_named(tmp_path, layout, store):
    """A budget without room for the smallest cache names the setting; a refused change changes nothing."""
    with pytest.raises(StorageError, match=r"storage\.host_budget"):
        TieredStore(str(tmp_path / "other"), layout, 1000)
    before = store.budget
    with pytest.raises(StorageError, match=r"storage\.host_budget"):
        store.set_budget(1000)
    assert store.budget == before


def test_table_that_outgrows_its_budget(tmp_path, layout):
    """When the index of the cold rows eats the budget up, the put is refused and the rows are still served."""
    budget = budget_for(layout, 64, 2000)
    rng = np.random.default_rng(7)
    with TieredStore(str(tmp_path / "store"), layout, budget, options=SMALL) as store:
        model, refused = {}, False
        for begin in range(0, 20000, 500):
            keys = np.arange(begin, begin + 500, dtype=np.uint64)
            records, t = random_rows(rng, 500, layout)
            try:
                store.put(keys, records, t)
            except StorageError as error:
                assert "storage.host_budget" in str(error)
                refused = True
                break
            model.update(as_dict(keys, records, t))
            assert store.nbytes <= budget
        assert refused and len(model) >= 1500
        found, records, t = read(store, keys_of(model))
        assert found.all() and as_dict(keys_of(model), records, t) == model
        store.set_budget(2 * budget)
        store.put(keys, records[:500], t[:500])
        assert store.rows == len(model) + 500
