"""Looking ahead in the tiers: what is read in the background changes no result."""

import numpy as np
import pytest

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs
from hpc_ctr.storage.cold import ColdStoreOptions
from hpc_ctr.storage.host_cache import PINNED
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.tiered import TieredStore, budget_for

LAYOUT = RecordLayout(3, 3)
OPTIONS = ColdStoreOptions(gap_bytes=256, read_bytes=2048, threads=2, max_segments=5, output_rows=200)
KEYS = np.random.default_rng(2).integers(0, 2**64, 3000, np.uint64)


def rows_of(keys, version):
    records = np.repeat((keys % np.uint64(1000)).astype(np.float32)[:, None], 6, 1)
    records[:, 1] = version
    return records, np.full(len(keys), version, np.uint32)


def read(store, keys):
    records, t = np.zeros((len(keys), 6), np.float32), np.zeros(len(keys), np.uint32)
    found = store.get(keys, records, t)
    return [(record.tobytes(), int(n)) if there else None for there, record, n in zip(found, records, t)]


@pytest.fixture
def store(tmp_path):
    with TieredStore(str(tmp_path), LAYOUT, budget_for(LAYOUT, 300, len(KEYS)), options=OPTIONS) as store:
        for begin in range(0, len(KEYS), 500):
            store.put(KEYS[begin:begin + 500], *rows_of(KEYS[begin:begin + 500], 1))
        store.flush()
        yield store


@pytest.mark.parametrize("limit", [0, 50, 10**9])
def test_staged_passes_equal_those_that_are_not(tmp_path, limit):
    """Passes over random keys, old and new ones, with and without looking ahead: the same rows throughout."""
    stores = [TieredStore(str(tmp_path / name), LAYOUT, budget_for(LAYOUT, 300, len(KEYS)), options=OPTIONS)
              for name in ("ahead", "plain")]
    rng = np.random.default_rng(limit)
    passes = [rng.permutation(KEYS)[:rng.integers(1, 900)] for _ in range(60)]
    for number, keys in enumerate(passes):
        answers = [read(store, keys) for store in stores]
        assert answers[0] == answers[1]
        if number + 1 < len(passes):
            stores[0].stage(passes[number + 1], limit)
        for store in stores:
            store.put(keys, *rows_of(keys, number + 2))
            if number % 7 == 0:
                store.flush()
        assert stores[0].nbytes <= stores[0].budget
        if number % 11 == 0:
            stores[0].cold.compact()
    ahead, plain = (store.counters() for store in stores)
    assert (ahead.rows_staged > 0) == (limit > 0) and plain.rows_staged == 0
    assert ahead.host_hits + ahead.cold_hits == plain.host_hits + plain.cold_hits
    for store in stores:
        store.close()


def test_what_is_staged_is_not_read_again(store):
    cold = KEYS[store.cache.lookup(KEYS) < 0][:400]
    store.stage(cold, 10**9)
    assert store.staged_bytes > 400 * LAYOUT.words * 4
    store._settle_staging()
    before = store.cold.counters.reads
    assert read(store, cold) == [(r.tobytes(), 1) for r in rows_of(cold, 1)[0]]
    assert store.cold.counters.reads == before and store.counters().rows_staged == 400
    store.unstage()
    assert store.staged_bytes == 0


def test_rows_that_changed_since_are_read_anew(store):
    """They were staged, then put and evicted, or moved by a compaction."""
    cold = KEYS[store.cache.lookup(KEYS) < 0][:400]
    store.stage(cold, 10**9)
    store._settle_staging()  # the tiers do so before they write
    store.cold.put(cold[:100], *rows_of(cold[:100], 7))
    store.cold.compact()
    rows = read(store, cold)
    assert rows[:100] == [(r.tobytes(), 7) for r in rows_of(cold[:100], 7)[0]]
    assert rows[100:] == [(r.tobytes(), 1) for r in rows_of(cold[100:], 1)[0]]
    assert store.counters().rows_staged == 300, "a row that was only moved is still the same"


def test_cached_rows_of_the_next_pass_are_not_evicted(store):
    cached = KEYS[store.cache.lookup(KEYS) >= 0][:150]
    store.stage(cached, 10**9)
    assert np.count_nonzero(store.cache.flags & PINNED) == len(cached)
    others = np.setdiff1d(KEYS, cached)
    for turn in range(4):
        part = others[turn * 500:(turn + 1) * 500]
        store.put(part, *rows_of(part, 3))
    assert (store.cache.lookup(cached) >= 0).all()
    store.unstage()
    assert not (store.cache.flags & PINNED).any()
    for turn in range(4):
        part = others[turn * 500:(turn + 1) * 500]
        read(store, part)
    assert (store.cache.lookup(cached) < 0).any()


def test_rows_that_come_back_stay_when_the_next_pass_wants_them(store):
    arriving = np.setdiff1d(KEYS, KEYS[store.cache.lookup(KEYS) >= 0])[:1000]
    wanted = arriving[-100:]
    store.stage(wanted, 0)
    store.put(arriving, *rows_of(arriving, 4))
    assert (store.cache.lookup(wanted) >= 0).all()


def test_a_smaller_budget_evicts_pinned_rows_too(store):
    store.stage(KEYS, 0)
    store.set_budget(budget_for(LAYOUT, 80, len(KEYS)))
    assert store.nbytes <= store.budget and store.cache.capacity < 300
    assert read(store, KEYS) == [(r.tobytes(), 1) for r in rows_of(KEYS, 1)[0]]


def test_a_read_that_fails_in_the_background_is_told(store, monkeypatch):
    cold = KEYS[store.cache.lookup(KEYS) < 0][:50]

    def broken(operation, path):
        if operation == "read":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(fs, "probe", broken)
    store.stage(cold, 10**9)
    with pytest.raises(StorageError, match="input/output error"):
        store._settle_staging()
    monkeypatch.setattr(fs, "probe", None)
    assert read(store, cold) == [(r.tobytes(), 1) for r in rows_of(cold, 1)[0]]
    store.unstage()


def test_closing_while_rows_are_on_their_way(store):
    store.stage(KEYS, 10**9)
    store.close()
