"""Rewrites in the background: the store is what it would be without them, whatever happens meanwhile."""

import os
import threading

import numpy as np
import pytest

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.rewrite import Rewrite

LAYOUT = RecordLayout(4, 8)
OPTIONS = ColdStoreOptions(background_bytes=0, output_rows=20000, max_segments=12)


def put(store: ColdStore, keys: np.ndarray, version: int) -> None:
    records = np.full((len(keys), LAYOUT.floats), version, np.float32)
    records[:, 0] = keys
    store.put(keys, records, np.full(len(keys), version, np.uint32))


def versions(store: ColdStore, keys: np.ndarray) -> np.ndarray:
    """The version of each key's row, -1 where there is none."""
    records, t = np.zeros((len(keys), LAYOUT.floats), np.float32), np.zeros(len(keys), np.uint32)
    found = store.get(keys, records, t)
    assert (records[found, 0] == keys[found].astype(np.float32)).all() and (records[found, 1] == t[found]).all()
    return np.where(found, t.astype(np.int64), -1)


def held_back(monkeypatch) -> threading.Event:
    """Rewrites that begin from now on copy nothing until the event is set."""
    go, run = threading.Event(), Rewrite._run

    def late(self):
        go.wait(60)
        run(self)

    monkeypatch.setattr(Rewrite, "_run", late)
    return go


def aged(path: str) -> ColdStore:
    """A store just before it is time to rewrite: 20,000 keys, put in part again."""
    store = ColdStore(path, LAYOUT, options=OPTIONS)
    keys = np.arange(20000, dtype=np.uint64)
    put(store, keys, 1)
    put(store, keys[:8000], 2)
    put(store, keys[8000:16000], 3)
    return store


def test_many_puts_equal_a_dict_and_the_disk_stays_bounded(tmp_path):
    rng = np.random.default_rng(0)
    want = np.full(30000, -1, np.int64)
    store = ColdStore(str(tmp_path), LAYOUT, options=OPTIONS)
    everything, compacted = np.arange(len(want), dtype=np.uint64), 0
    for turn in range(300):
        keys = rng.choice(len(want), 3000, replace=False)
        put(store, keys.astype(np.uint64), turn)
        want[keys] = turn
        assert store.rows == np.count_nonzero(want >= 0)
        assert sum(s.rows for s in store.segments()) <= 2 * store.rows + 20000
        if turn % 10 == 0:
            assert (versions(store, everything) == want).all()
        if turn % 50 == 49:
            compacted += store.counters.rows_compacted
            store.close()
            store = ColdStore(str(tmp_path), LAYOUT, options=OPTIONS)
            assert store.rows == np.count_nonzero(want >= 0)
    store.finish()
    assert compacted > 0 and store.verify() == []
    assert (versions(store, everything) == want).all()
    store.close()


def test_what_is_put_while_rows_are_copied_wins(tmp_path, monkeypatch):
    """Before the copying, after it, and in the files as the next process finds them."""
    go = held_back(monkeypatch)
    keys = np.arange(20000, dtype=np.uint64)
    with aged(str(tmp_path)) as store:
        assert store.rewriting is not None and not store.rewriting.done
        put(store, keys[:100], 4)
        assert (versions(store, keys[:100]) == 4).all()
        go.set()
        store.rewriting.outputs()
        put_number = max(s.path for s in store.segments())
        records = np.full((100, LAYOUT.floats), 5, np.float32)
        records[:, 0] = keys[19900:]
        store.write(keys[19900:], np.full(100, 5, np.uint32), np.arange(100), records.view(np.uint32),
                    records.view(np.uint32), np.full(100, -1, np.int64))  # rows that were copied, before they count
        store.finish()
        paths = [s.path for s in store.segments()]
        assert store.rewriting is None and paths == sorted(paths) and put_number in paths
        want = np.where(keys < 100, 4, np.where(keys < 8000, 2, np.where(keys < 16000, 3, 1)))
        want[19900:] = 5
        assert (versions(store, keys) == want).all() and store.rows == 20000
        assert sum(s.live for s in store.segments()) == 20000
    with ColdStore(str(tmp_path), LAYOUT, options=OPTIONS) as store:
        assert (versions(store, keys) == want).all()
        assert sum(s.live for s in store.segments()) == 20000


def test_everything_is_overwritten_while_it_is_copied(tmp_path, monkeypatch):
    go = held_back(monkeypatch)
    keys = np.arange(20000, dtype=np.uint64)
    with aged(str(tmp_path)) as store:
        records = np.full((20000, LAYOUT.floats), 7, np.float32)
        records[:, 0] = keys
        store.write(keys, np.full(20000, 7, np.uint32), np.arange(20000), records.view(np.uint32),
                    records.view(np.uint32), np.full(20000, -1, np.int64))
        go.set()
        store.finish()
        assert (versions(store, keys) == 7).all()
        store.tidy()
        assert [s.live for s in store.segments()] == [20000]
        assert len([name for name in os.listdir(tmp_path) if name.endswith(".h5")]) == 1


def test_a_store_that_is_closed_gives_the_rewrite_up(tmp_path, monkeypatch):
    go = held_back(monkeypatch)
    store = aged(str(tmp_path))
    named = {s.path for s in store.segments()}
    threading.Timer(0.1, go.set).start()
    store.close()
    assert {str(tmp_path / name) for name in os.listdir(tmp_path) if name.endswith((".h5", ".tmp"))} == named
    with ColdStore(str(tmp_path), LAYOUT, options=OPTIONS) as store:
        assert store.rows == 20000


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_an_error_in_the_background_is_raised_once_and_nothing_is_lost(tmp_path, monkeypatch, operation):
    go = held_back(monkeypatch)
    keys = np.arange(20000, dtype=np.uint64)
    with aged(str(tmp_path)) as store:
        named = {s.path for s in store.segments()}

        def full(what, path):
            if what == operation and threading.current_thread() is not threading.main_thread():
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(fs, "probe", full)
        go.set()
        with pytest.raises(StorageError, match="no space"):
            store.finish()
        monkeypatch.setattr(fs, "probe", None)
        assert {str(tmp_path / name) for name in os.listdir(tmp_path) if name.endswith((".h5", ".tmp"))} == named
        want = np.where(keys < 8000, 2, np.where(keys < 16000, 3, 1))
        assert (versions(store, keys) == want).all()
        put(store, keys[:10], 6)
        store.compact()
        assert store.rows == 20000 and (versions(store, keys[:10]) == 6).all()
