"""Rows with a lifecycle, and their deletion: like a dict, after reopening, crashes, rewriting and restoring."""

import errno
import os
import shutil

import h5py
import numpy as np
import pytest

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs, manifest, recovery
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.compact import purge
from hpc_ctr.storage.describe import describe_store
from hpc_ctr.storage.record import LATER, LIFE, RecordLayout
from hpc_ctr.storage.segment import live_rows
from hpc_ctr.storage.tiered import TieredStore, budget_for

LAYOUTS = [RecordLayout(4, 8, lifecycle=True), RecordLayout(3, 1, np.float64, lifecycle=True),
           RecordLayout(1, 0, lifecycle=True)]
LAYOUT = LAYOUTS[0]
UNIVERSE, CACHED = 600, 80
# small limits, so that some hundred rows already take many segments, reads and rewrites
SMALL = ColdStoreOptions(gap_bytes=256, read_bytes=2048, max_segments=5, output_rows=200)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """What matters is the order of the operations."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def rows_of(keys, layout, version, last=0):
    """(rows, t) whose contents follow from key and version, last seen at sample ``last``."""
    keys = np.asarray(keys, np.uint64)
    rows = layout.empty(len(keys))
    layout.records(rows)[:] = keys[:, None] % 1000 + np.arange(layout.floats) + version / 16
    life = layout.life(rows)
    life["show"], life["click"], life["last"] = version * 256, keys % 7, last
    return rows, np.full(len(keys), version, np.uint32)


def as_dict(keys, rows, t):
    return {int(k): (r.tobytes(), int(s)) for k, r, s in zip(keys, rows, t, strict=True)}


def everything(store):
    rows = {}
    for batch in store.iterate(50):
        got = as_dict(*batch)
        assert not rows.keys() & got.keys(), "iterate gave a row twice"
        rows.update(got)
    assert store.rows == len(rows)
    return rows


def expires_by_last(life):
    """Rows go when they have not been seen for 100 samples."""
    return life["last"].astype(np.int64) + 100


class Model:
    """A store and the dict that it must equal; ``history``: what a row has been since the last flush."""

    def __init__(self, directory, layout, seed):
        self.directory, self.layout, self.rng = str(directory), layout, np.random.default_rng(seed)
        self.keys = np.append(np.unique(self.rng.integers(0, 2**64, UNIVERSE, dtype=np.uint64)),
                              np.array([0, 2**64 - 1], np.uint64))
        self.budget = budget_for(layout, CACHED, 2 * len(self.keys))
        self.rows, self.last, self.history = {}, {}, {}
        self.version = self.now = self.deleted = 0
        self.store = self.open()

    def open(self):
        return TieredStore(self.directory, self.layout, self.budget, options=SMALL)

    def some_keys(self):
        n = int(self.rng.choice([0, 1, 7, 40, 2 * CACHED, 4 * CACHED]))
        return self.rng.permutation(self.keys)[:n]

    def change(self, key, row):
        self.history.setdefault(key, [self.rows.get(key)]).append(row)
        if row is None:
            self.deleted += self.rows.pop(key, None) is not None
        else:
            self.rows[key], self.last[key] = row, self.now

    def put(self):
        keys, self.version = self.some_keys(), self.version + 1
        rows, t = rows_of(keys, self.layout, self.version, self.now)
        for key, row in as_dict(keys, rows, t).items():
            self.change(key, row)
        self.store.put(keys, rows, t)

    def get(self):
        keys = self.some_keys()
        rows, t = self.layout.empty(len(keys)), np.full(len(keys), 77, np.uint32)
        rows[:] = 0xA5A5A5A5
        found = self.store.get(keys, rows, t)
        assert found.tolist() == [int(k) in self.rows for k in keys]
        assert as_dict(keys[found], rows[found], t[found]) == {int(k): self.rows[int(k)] for k in keys[found]}
        assert (rows[~found] == 0xA5A5A5A5).all() and (t[~found] == 77).all()

    def update(self):
        self.get()
        self.put()

    def delete(self):
        keys = self.some_keys()
        assert self.store.delete(keys) == sum(int(k) in self.rows for k in keys)
        for key in keys.tolist():
            self.change(key, None)

    def shrink(self):
        self.now += int(self.rng.integers(0, 40))
        gone = [key for key in self.rows if self.last[key] + 100 <= self.now]
        lives = []
        assert self.store.shrink(self.now, expires_by_last, lives.append) == len(gone) == sum(map(len, lives))
        assert all((life["last"] + 100 <= self.now).all() and life.dtype == LIFE for life in lives)
        for key in gone:
            self.change(key, None)

    def flush(self):
        self.store.flush()
        self.history = {}

    def compact(self):
        self.store.cold.compact()

    def reopen(self):
        self.flush()
        self.store.close()
        self.store = self.open()

    def lose(self):
        """Close without a flush: each row is what it was at the last flush, or what it was later."""
        self.store.close()
        self.store = self.open()
        present = everything(self.store)
        for key in set(self.rows) | set(present):
            assert present.get(key) in self.history.get(key, [self.rows.get(key)])
        for key, row in present.items():
            life = self.layout.life(np.frombuffer(row[0], np.uint32).reshape(1, -1))
            self.last[key] = int(life["last"][0])
        self.rows, self.history = present, {}

    def check_all(self):
        assert everything(self.store) == self.rows and len(self.store) == len(self.rows)
        assert self.store.verify() == []


@pytest.mark.parametrize("seed,layout", list(enumerate(LAYOUTS * 2)), ids=lambda v: str(v).split("(")[0])
def test_random_operations_equal_a_dict(tmp_path, seed, layout):
    model = Model(tmp_path / "store", layout, seed)
    operations = [model.put, model.get, model.update, model.delete, model.shrink, model.flush, model.compact,
                  model.reopen, model.lose]
    for step in range(120):
        operations[int(model.rng.choice(len(operations), p=[.2, .15, .2, .12, .14, .06, .04, .05, .04]))]()
        assert model.store.nbytes <= model.store.budget
        if step % 20 == 19:
            model.check_all()
    model.reopen()
    model.check_all()
    model.store.close()
    assert model.deleted > UNIVERSE


def test_segments_hold_the_lifecycle_in_columns_that_h5py_reads(tmp_path):
    keys = np.arange(50, dtype=np.uint64)
    with ColdStore(str(tmp_path), LAYOUT) as store:
        store.put(keys, *rows_of(keys, LAYOUT, 3, last=1000))
        store.delete(keys[:5])
        paths = [s.path for s in store.segments()]
    with h5py.File(paths[0]) as file:
        assert int(file.attrs["version"]) == 2 and int(file.attrs["deletions"]) == 0
        assert set(file["rows"]["show"] / 256) == {3.0} and set(file["rows"]["last"]) == {1000}
        assert (file["rows"]["click"] == keys % 7).all()
        assert (file["rows"]["x"][:, 1] == keys + 1 + 3 / 16).all()
    with h5py.File(paths[1]) as file:
        assert int(file.attrs["deletions"]) == 1 and file["rows"]["key"].tolist() == [0, 1, 2, 3, 4]
    told = describe_store(str(tmp_path))
    assert told["columns"] == ["show", "click", "last"] and told["row_bytes"] == LAYOUT.stored_bytes == 80
    assert manifest.load(str(tmp_path)).layout == LAYOUT


def test_without_a_lifecycle_files_are_of_version_1(tmp_path):
    plain = RecordLayout(4, 8)
    with ColdStore(str(tmp_path), plain) as store:
        store.put(np.arange(5, dtype=np.uint64), np.ones((5, 12), np.float32), np.ones(5, np.uint32))
        path = store.segments()[0].path
    with h5py.File(path) as file:
        assert int(file.attrs["version"]) == 1 and "deletions" not in file.attrs
        assert file["rows"].dtype.names == ("key", "check", "t", "x", "state")
    assert b'"version": 1' in (tmp_path / manifest.NAME).read_bytes()
    with pytest.raises(StorageError, match="lifecycle"):
        ColdStore(str(tmp_path), RecordLayout(4, 8, lifecycle=True))


# --- crashes


class Crash(BaseException):
    """The process ends here."""


FIRST, GONE = np.arange(90, dtype=np.uint64), np.arange(20, 70, dtype=np.uint64)


def committed(directory):
    """What a new process would find."""
    with ColdStore(str(directory), LAYOUT) as store:
        rows = everything(store)
        assert store.verify() == []
        live = {os.path.basename(s.path) for s in store.segments()}
        assert set(os.listdir(directory)) == live | {manifest.NAME, recovery.LOCK}
        return rows


def deleted(store):
    store.delete(GONE)
    store.tidy()


ACTIONS = {"delete": deleted, "rewrite": ColdStore.compact, "purge": lambda store: purge(store, 40)}


@pytest.mark.parametrize("kind", ["crash", "error", "disk full"])
@pytest.mark.parametrize("what", list(ACTIONS))
def test_failure_at_each_operation(tmp_path, monkeypatch, what, kind):
    """Deleted keys stay deleted and the others stay, whatever file operation is the last one."""
    base = tmp_path / "base"
    with ColdStore(str(base), LAYOUT, options=ColdStoreOptions(stale_share=1.0, output_rows=1 << 30)) as store:
        store.put(FIRST, *rows_of(FIRST, LAYOUT, 1))
        store.put(FIRST[::3], *rows_of(FIRST[::3], LAYOUT, 2))     # an older row of these is in the first segment
        before = everything(store)
        if what != "delete":
            store.delete(GONE)
            store.put(GONE[:5], *rows_of(GONE[:5], LAYOUT, 3))     # deletions that are superseded
            before = everything(store)
            assert len(before) == 45
    after = {k: v for k, v in before.items() if k not in GONE.tolist()} if what == "delete" else before
    number, outcomes = 0, set()
    while True:
        directory = tmp_path / "try"
        shutil.copytree(base, directory)
        store = ColdStore(str(directory), LAYOUT, options=ColdStoreOptions(output_rows=40))
        seen = []

        def probe(operation, path):
            seen.append((operation, os.path.basename(path)))
            if len(seen) - 1 == number or (kind != "error" and len(seen) > number):
                raise Crash if kind == "crash" else OSError(errno.EIO if kind == "error" else errno.ENOSPC, "x")

        monkeypatch.setattr(fs, "probe", probe)
        try:
            ACTIONS[what](store)
        except (StorageError, Crash):
            pass
        monkeypatch.setattr(fs, "probe", None)
        if kind != "crash":
            assert everything(store) in (before, after)
        store.close()
        got = committed(directory)
        assert got in (before, after)
        outcomes.add(len(got))
        shutil.rmtree(directory)
        if len(seen) <= number:
            break
        number += 1
    assert number > 10 and outcomes == {len(before), len(after)}


def test_deletions_are_dropped_when_no_older_segment_is_left(tmp_path):
    keys = np.arange(400, dtype=np.uint64)
    with ColdStore(str(tmp_path), LAYOUT, options=ColdStoreOptions(output_rows=160)) as store:
        for version in (1, 2):
            store.put(keys, *rows_of(keys, LAYOUT, version))
        store.delete(keys[:100])
        store.tidy()
        assert store.rows == 300 and store.entries == 300, "a purge was due"
        store.delete(keys[100:105])
        store.tidy()
        assert (store.rows, store.entries) == (295, 300), "too few for a purge"
        rest = everything(store)
    assert set(rest) == set(range(105, 400))
    with ColdStore(str(tmp_path), LAYOUT) as store:
        assert everything(store) == rest and (store.rows, store.entries) == (295, 300)
        store.put(keys[100:105], *rows_of(keys[100:105], LAYOUT, 9))
        assert store.rows == store.entries == 300
        assert set(everything(store)) == set(range(100, 400))


def test_restored_and_loaded_stores_know_what_was_deleted(tmp_path):
    """As a checkpoint brings them back, on the same and on another rank count."""
    rng = np.random.default_rng(1)
    keys = np.unique(rng.integers(0, 2**64, 500, dtype=np.uint64))
    budget = budget_for(LAYOUT, 100, 2000)
    with TieredStore(str(tmp_path / "a"), LAYOUT, budget) as store:
        for version in (1, 2):
            store.put(keys, *rows_of(keys, LAYOUT, version))
            store.flush()
        store.delete(keys[::2])
        store.put(keys[:10], *rows_of(keys[:10], LAYOUT, 3))
        store.flush()
        rows, segments = everything(store), store.segments()
        assert len(rows) == 255 and any(s.rows < 255 for s in segments)
        found = {}
        for batch in live_rows([s.path for s in segments], layout=LAYOUT):
            found.update(as_dict(*batch))
        assert found == rows
    with TieredStore.restore(str(tmp_path / "b"), segments, LAYOUT, budget) as again:
        assert everything(again) == rows
        again.put(keys[10:20], *rows_of(keys[10:20], LAYOUT, 4))
        assert again.rows == len(rows) + 5
    halves = {}
    for name, first, last in (("c", 0, 2**63 - 1), ("d", 2**63, 2**64 - 1)):
        with TieredStore(str(tmp_path / name), LAYOUT, budget) as part:
            part.load(segments, first, last)
            halves |= everything(part)
    assert halves == rows


def test_many_deletions_leave_no_long_list_of_free_slots(tmp_path):
    """That list is part of the budget; the rows that stay move together, with all that is kept beside them."""
    keys = np.random.default_rng(2).permutation(3000).astype(np.uint64)
    with TieredStore(str(tmp_path), LAYOUT, budget_for(LAYOUT, 3200, 3200)) as store:
        store.put(keys, *rows_of(keys, LAYOUT, 1))
        full, want = store.nbytes, everything(store)
        assert store.delete(keys[::2]) == 1500
        assert store.nbytes < 0.7 * full and len(store.cache._free) <= store.cache.capacity // 16
        assert everything(store) == {k: v for k, v in want.items() if k not in set(keys[::2].tolist())}
        store.put(keys[::2], *rows_of(keys[::2], LAYOUT, 1))
        assert everything(store) == want and store.counters().segments_written == 0


def test_shrink_reads_a_segment_again_only_when_a_row_may_be_due(tmp_path):
    keys = np.arange(300, dtype=np.uint64)
    with ColdStore(str(tmp_path), LAYOUT) as cold:
        cold.put(keys, *rows_of(keys, LAYOUT, 1, last=500))
    with TieredStore(str(tmp_path), LAYOUT, budget_for(LAYOUT, 64, 1000)) as store:
        asked = []

        def due(life):
            asked.append(len(life))
            return expires_by_last(life)

        for now, scanned, gone in ((100, 300, 0), (200, 0, 0), (599, 0, 0), (600, 300, 300)):
            asked.clear()
            assert store.shrink(now, due) == gone and sum(asked) == scanned
        assert store.rows == 0 and store.shrink(10**9, lambda life: np.full(len(life), LATER)) == 0
