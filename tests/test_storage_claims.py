"""Rows overwritten unread: exact also for keys that look alike to the index."""

import numpy as np
import pytest

from hpc_ctr.errors import StorageError
from hpc_ctr.kernels.cold_index import same_print
from hpc_ctr.storage import fs
from hpc_ctr.storage.claims import Claims
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.tiered import TieredStore

LAYOUT = RecordLayout(2, 1)
SMALL = dict(gap_bytes=256, read_bytes=2048, threads=2, max_segments=6, output_rows=40)
MASK = 2**64 - 1
FACTOR = 0xD6E8FEB86659FD93


def unmix(x: int) -> int:
    """The key that the index mixes into ``x``."""
    inverse = pow(FACTOR, -1, 2**64)
    x = x * inverse & MASK
    x ^= x >> 32
    x = x * inverse & MASK
    return x ^ x >> 32


def alike(families: int, members: int) -> np.ndarray:
    """Keys of which ``members`` at a time have the same group and fingerprint, shuffled."""
    rng = np.random.default_rng(3)
    tops = rng.integers(0, 2**40, families, np.uint64)
    return rng.permutation(np.array([unmix(int(top) << 24 | low) for top in tops for low in range(members)], np.uint64))


def rows_of(keys: np.ndarray, version: int) -> tuple[np.ndarray, np.ndarray]:
    records = np.empty((len(keys), 3), np.float32)
    records[:, 0], records[:, 1], records[:, 2] = keys & np.uint64(0xFFFF), version, keys >> np.uint64(48)
    return records, np.full(len(keys), version, np.uint32)


def held(store) -> dict[int, tuple]:
    out = {}
    for keys, records, t in store.iterate(7):
        for key, record, n in zip(keys, records, t):
            assert int(key) not in out
            out[int(key)] = (record.tobytes(), int(n))
    return out


def test_keys_of_a_family_look_alike():
    keys = np.sort(alike(5, 4))
    assert len(set(keys.tolist())) == 20
    assert sorted(same_print(keys, key).sum() for key in keys) == [4] * 20


@pytest.mark.parametrize("members, claim_bytes", [(1, 1 << 20), (2, 1 << 20), (3, 1 << 20), (3, 12 * 20), (3, 0)])
@pytest.mark.parametrize("background", [0, 1 << 20])
def test_random_operations_equal_a_dict(tmp_path, members, claim_bytes, background):
    """Half of all puts claim the entry of another key here; in life one in a billion does."""
    rng = np.random.default_rng(members)
    keys = alike(120 // members, members)
    options = ColdStoreOptions(**SMALL, claim_bytes=claim_bytes, background_bytes=background)
    store, model = ColdStore(str(tmp_path), LAYOUT, options=options), {}
    claims = 0
    for turn in range(300):
        what = rng.choice(["put", "put", "put", "get", "compact", "reopen", "settle", "iterate"],
                          p=[.25, .25, .2, .2, .03, .02, .02, .03])
        chosen = rng.permutation(keys)[:rng.integers(1, 40)]
        if what == "put":
            records, t = rows_of(chosen, turn)
            store.put(chosen, records, t)
            model |= {int(k): (r.tobytes(), int(n)) for k, r, n in zip(chosen, records, t)}
        elif what == "get":
            records, t = np.zeros((len(chosen), 3), np.float32), np.zeros(len(chosen), np.uint32)
            found = store.get(chosen, records, t)
            for key, there, record, n in zip(chosen, found, records, t):
                assert (int(key) in model) == there
                assert not there or model[int(key)] == (record.tobytes(), int(n))
        elif what == "compact":
            store.compact()
        elif what == "settle":
            store.settle_claims()
            assert store.rows == len(model) and store.claims.nbytes == 0
        elif what == "iterate":
            assert held(store) == model
        else:
            store.close()
            store = ColdStore(str(tmp_path), LAYOUT, options=options)
            assert store.rows == len(model)
        claims = max(claims, store.claims.nbytes)
        assert store.claims.nbytes <= claim_bytes
        assert sum(s.rows for s in store.segments()) <= 2 * len(model) + 40 or what != "put"
    assert held(store) == model and (claims > 0) == (claim_bytes > 0)
    store.close()


def test_deleted_keys_stay_deleted(tmp_path):
    layout = RecordLayout(2, 1, lifecycle=True)
    rng = np.random.default_rng(8)
    keys = alike(30, 3)
    store, model = ColdStore(str(tmp_path), layout, options=ColdStoreOptions(**SMALL)), set()
    for turn in range(120):
        chosen = rng.permutation(keys)[:25]
        if turn % 3:
            rows = layout.empty(len(chosen))
            rows[:] = 0
            store.put(chosen, rows, np.full(len(chosen), turn, np.uint32))
            model |= set(chosen.tolist())
        else:
            gone = store.delete(chosen)
            assert gone.tolist() == [int(k) in model for k in chosen]
            model -= set(chosen.tolist())
            store.tidy()
        found = store.get(keys, layout.empty(len(keys)), np.zeros(len(keys), np.uint32))
        assert set(keys[found].tolist()) == model
    store.settle_claims()
    assert store.rows == len(model)
    store.close()
    with ColdStore(str(tmp_path), layout) as store:
        assert store.rows == len(model)


def test_overwriting_reads_nothing(tmp_path):
    keys = np.random.default_rng(1).integers(0, 2**64, 5000, np.uint64)
    with ColdStore(str(tmp_path), LAYOUT) as store:
        store.put(keys, *rows_of(keys, 0))
        store.put(keys[:2000], *rows_of(keys[:2000], 1))
        assert store.claims.nbytes == 12 * 2000 and store.rows == len(keys)
        store.put(keys[2000:], *rows_of(keys[2000:], 1))  # which compares and drops the first segment
        assert store.claims.nbytes == 0 and len(store.segments()) == 2 and store.counters.reads == 0
        records, t = np.empty((len(keys), 3), np.float32), np.empty(len(keys), np.uint32)
        assert store.get(keys, records, t).all() and (t == 1).all() and np.array_equal(records, rows_of(keys, 1)[0])


def test_claims_of_a_put_that_failed_are_not_kept(tmp_path, monkeypatch):
    keys = alike(20, 2)
    first, second = keys[::2], keys[1::2]
    with ColdStore(str(tmp_path), LAYOUT) as store:
        store.put(first, *rows_of(first, 0))

        def full(operation, path):
            if operation == "sync":
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(fs, "probe", full)
        with pytest.raises(StorageError, match="no space"):
            store.put(second, *rows_of(second, 1))
        monkeypatch.setattr(fs, "probe", None)
        assert store.claims.nbytes == 0 and store.rows == len(first)
        records, t = np.empty((len(keys), 3), np.float32), np.empty(len(keys), np.uint32)
        assert store.get(keys, records, t).sum() == len(first)


def test_claims_made_after_a_rewrite_that_failed_are_compared_too(tmp_path, monkeypatch):
    """The rewrite read the claims that there were; the next one must not go by these."""
    keys = np.sort(alike(40, 2))
    families = [keys[same_print(keys, key)] for key in keys]
    first = np.unique([family[0] for family in families])
    others = np.unique([family[1] for family in families])
    with ColdStore(str(tmp_path), LAYOUT, options=ColdStoreOptions(**SMALL)) as store:
        store.put(first, *rows_of(first, 1))
        store.put(others[:10], *rows_of(others[:10], 2))  # claims ten rows of the first segment, wrongly

        def full(operation, path):
            if operation == "sync":
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(fs, "probe", full)
        with pytest.raises(StorageError, match="no space"):
            store.compact()
        monkeypatch.setattr(fs, "probe", None)
        store.put(others[10:], *rows_of(others[10:], 3))
        store.compact()
        assert store.rows == len(first) + len(others) and set(held(store)) == set(keys.tolist())


def test_the_tiers_keep_claims_within_their_budget(tmp_path):
    """A put without a get before it claims; a smaller budget compares what no longer fits."""
    keys = np.random.default_rng(5).integers(0, 2**64, 20000, np.uint64)
    with TieredStore(str(tmp_path), LAYOUT, 4 << 20) as store:
        for begin in range(0, len(keys), 1000):
            store.put(keys[begin:begin + 1000], *rows_of(keys[begin:begin + 1000], 1))
        store.flush()
        store.set_budget(600 << 10)
        store.put(keys[:9000], *rows_of(keys[:9000], 2))
        assert store.nbytes <= store.budget
        store.set_budget(500 << 10)
        assert store.cold.claims.nbytes <= (500 << 10) // 64 and store.nbytes <= store.budget
        records, t = np.empty((len(keys), 3), np.float32), np.empty(len(keys), np.uint32)
        assert store.get(keys, records, t).all()
        assert (t[:9000] == 2).all() and (t[9000:] == 1).all()


def test_claims_count_their_room():
    claims = Claims(120)
    claims.add(3, np.arange(4), np.arange(4, dtype=np.uint64))
    claims.add(4, np.arange(0), np.arange(0, dtype=np.uint64))
    assert claims.room == 6 and 3 in claims and 4 not in claims
    rows, claimants = claims.among(3, 1, 5)
    assert rows.tolist() == [0, 1, 2] and claimants.tolist() == [1, 2, 3]
    claims.drop(3)
    claims.drop(3)
    assert claims.room == 10 and claims.limit(0)
