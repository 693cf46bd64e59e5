"""The three hash tables (cache index, cold index, dedup) against plain Python."""

import numpy as np
import pytest
from numba import njit

from hpc_ctr.kernels.checksum import fold_bytes, fold_checks, new_digest, row_check
from hpc_ctr.kernels.dedup import dedup
from hpc_ctr.kernels.hashing import mix64, mix_range
from hpc_ctr.kernels.index import KeyIndex, buckets_for, table_delete, table_insert
from hpc_ctr.storage.cold import ColdStore
from hpc_ctr.storage.cold_index import LAST_LOCATION, ROW_BYTES, ColdIndex, bytes_for
from hpc_ctr.storage.record import RecordLayout

WORD = 2**64 - 1
SHARD = np.uint64(0x2AB << 54)     # the ten high bits of a key, by which its owner is found
_MIX = 0xD6E8FEB86659FD93
ROW_CHECKS = [0x1A09AA39, 0xD4F4129C, 0xD4A63FF8, 0xD144CA8C]
BYTES_DIGEST = 0x0450EDC5E0B998DC
CHECKS_DIGEST = 0xBE03129DFCAF7753
_UNMIX = pow(_MIX, -1, 2**64)


def array(keys):
    """Python integers as a key array."""
    return np.array(list(keys), np.uint64)


def uniform(rng, n):
    """Distinct random keys, the smallest and the largest among them."""
    keys = np.unique(np.concatenate([rng.integers(0, 2**64, n, dtype=np.uint64), array([0, WORD])]))
    return rng.permutation(keys)


def same_low_bits(n, low=0x3FF):
    """Keys that all have the same home bucket, the last one: every probe wraps around the end."""
    return array((i << 20) + 0xFFC00 + low for i in range(n))


def neighbours(rng, n):
    """Keys whose homes lie in a short range that wraps around the end: long, mixed clusters."""
    homes = rng.integers(-40, 40, n)
    return array(((i + 1) * 2**32 + int(home)) & WORD for i, home in enumerate(homes))


# --- the index of the host cache


def check_index(index, model):
    """The index holds exactly the model's entries."""
    assert len(index) == len(model)
    keys, slots = index.entries()
    assert dict(zip(keys.tolist(), slots.tolist(), strict=True)) == model
    if model:
        assert index.lookup(array(model)).tolist() == list(model.values())


def churn(index, keys, rng, rounds):
    """Random inserts, overwrites and deletes, with and without a growing table, beside a dict."""
    model = {}
    for _ in range(rounds):
        some = rng.permutation(keys)[:int(rng.integers(0, len(keys)))]
        if rng.random() < 0.55:
            slots = rng.integers(0, 2**40, len(some))
            new = sum(int(k) not in model for k in some)
            assert index.insert(some, slots) == new
            model.update(zip(some.tolist(), slots.tolist(), strict=True))
        else:
            expected = [model.pop(int(k), -1) for k in some]
            assert index.delete(some).tolist() == expected
        check_index(index, model)
        absent = array(int(k) for k in keys if int(k) not in model)
        assert (index.lookup(absent) == -1).all()


@pytest.mark.parametrize("max_rows", [0, 2000], ids=["copying", "in place"])
@pytest.mark.parametrize("kind", ["uniform", "same low bits", "neighbours"])
def test_index_equals_a_dict(kind, max_rows):
    """Inserts, overwrites, backward-shift deletes and growth, for friendly and hostile keys."""
    rng = np.random.default_rng(11)
    keys = {"uniform": uniform(rng, 600), "same low bits": same_low_bits(300),
            "neighbours": neighbours(rng, 400)}[kind]
    churn(KeyIndex(max_rows), keys, rng, 60)


@pytest.mark.parametrize("kind", ["uniform", "same low bits", "neighbours"])
def test_index_grows_one_by_one(kind):
    """Growth by one key at a time passes every load of every size."""
    rng = np.random.default_rng(12)
    keys = {"uniform": uniform(rng, 400), "same low bits": same_low_bits(200),
            "neighbours": neighbours(rng, 400)}[kind]
    index, model = KeyIndex(len(keys)), {}
    for slot, key in enumerate(keys):
        assert index.insert(keys[slot:slot + 1], np.array([slot])) == 1
        model[int(key)] = slot
        if slot % 17 == 0:
            check_index(index, model)
    check_index(index, model)
    assert index.buckets == buckets_for(len(keys))


def test_index_extreme_slots_and_repeats():
    """Slot 0 and very large slots; a key given twice keeps its last slot; a key deleted twice is gone once."""
    index = KeyIndex()
    assert index.insert(array([0, WORD, 7, 7]), np.array([0, 2**62, 1, 2])) == 3
    assert index.lookup(array([0, WORD, 7, 8])).tolist() == [0, 2**62, 2, -1]
    assert index.delete(array([7, 7, 8])).tolist() == [2, -1, -1] and len(index) == 2
    assert index.lookup(array([])).tolist() == [] and index.delete(array([])).tolist() == []


def test_index_change_and_rebuild():
    """``change`` moves entries, and refuses a key that is not there; ``rebuild`` shrinks the table."""
    rng = np.random.default_rng(13)
    keys = uniform(rng, 1000)
    index = KeyIndex(4000)
    index.insert(keys, np.arange(len(keys)))
    index.change(keys, np.arange(len(keys)) + 5)
    check_index(index, dict(zip(keys.tolist(), range(5, len(keys) + 5), strict=True)))
    large = index.nbytes
    index.rebuild(keys[:20], np.arange(20))
    check_index(index, dict(zip(keys[:20].tolist(), range(20), strict=True)))
    assert index.nbytes < large
    with pytest.raises(KeyError):
        index.change(keys[50:51], np.array([1]))


@njit
def replace_entries(table, buckets, live, state, rounds):
    """Delete a random entry and insert a new one, so many times; returns the random state, and how often the index
    did not do what it was told. ``live[slot]`` is the key of each slot; new keys are of the same shard."""
    wrong, out, slot = 0, np.empty(1, np.int64), np.empty(1, np.int64)
    for _ in range(rounds):
        state += np.uint64(1)
        place = np.int64(mix64(state) % np.uint64(len(live)))
        key = live[place:place + 1]
        wrong += table_delete(table, buckets, key, out) != 1 or out[0] != place
        key[0] = SHARD | (mix64(~state) >> np.uint64(10))
        slot[0] = place
        wrong += table_insert(table, buckets, key, slot) != 1
    return state, wrong


def test_index_probes_stay_short_under_churn():
    """Deletion leaves no tombstones: 10^8 deletes and as many inserts, at a load of 0.7 and with keys of one shard,
    leave probes as short as in a fresh table."""
    rows = int(0.7 * 2**20)
    live = np.uint64(SHARD) | (mix_range(np.uint64(14) << np.uint64(40), rows) >> np.uint64(10))
    index, state = KeyIndex(rows), np.uint64(0)
    assert index.insert(live, np.arange(rows)) == rows and index.buckets == 2**20
    fresh = index.mean_probe()
    assert 1 < fresh < 1.4      # linear probing at this load: 1/2 (1 / (1 - 0.7) - 1) = 1.17
    for _ in range(10):
        state, wrong = replace_entries(index.table, index.buckets, live, state, 10**7)
        assert wrong == 0 and index.mean_probe() < 2 * fresh
    keys, slots = index.entries()
    assert (live[slots] == keys).all() and (index.lookup(live) == np.arange(rows)).all()


# --- the index of the cold tier


def key_of(group, fingerprint, rest):
    """The key that the cold index sees as this group and fingerprint: its mixing, backwards."""
    x = group << 56 | fingerprint << 24 | rest
    x = x * _UNMIX & WORD
    x ^= x >> 32
    x = x * _UNMIX & WORD
    return x ^ x >> 32


def candidates(index, key):
    """All locations that may be the key's, as ``find`` lists them."""
    found, skip = [], 0
    while (place := int(index.find(array([key]), np.array([skip]))[0])) >= 0:
        found.append(place)
        skip += 1
    return found


def colliding(groups=(0, 9, 255)):
    """Keys with equal fingerprints, with fingerprints of the same home, and with homes that wrap around."""
    prints = [0, 1, 2**31, 2**32 - 2, 2**32 - 1]
    return [key_of(g, f, r) for g in groups for f in prints for r in range(12)]


def check_cold_index(index, model):
    """Every key's location is among its candidates, and nothing is in the index that is not in the model."""
    assert len(index) == len(model)
    keys, places = array(model), np.array(list(model.values()), np.int64)
    assert index.has(keys, places).all()
    assert not index.has(keys, places ^ 1).any()
    for key, place in list(model.items())[::7]:
        assert candidates(index, key).count(place) == 1


@pytest.mark.parametrize("kind", ["uniform", "colliding"])
def test_cold_index_equals_a_dict(kind):
    """Adds, moves and removals in random order; even locations alone, so that an odd one is never there."""
    rng = np.random.default_rng(21)
    keys = uniform(rng, 3000) if kind == "uniform" else array(colliding())
    index, model, following = ColdIndex(), {}, 0
    for _ in range(40):
        some = rng.permutation(keys)[:int(rng.integers(1, len(keys) // 2))]
        absent = np.array([int(k) not in model for k in some])
        fresh = following + 2 * np.arange(len(some))
        following += 2 * len(some)
        old = np.array([model.get(int(k), -1) for k in some])
        if rng.random() < 0.6:
            index.move(some, old, fresh)
            index.add(some, fresh, absent)
            model.update(zip(some.tolist(), fresh.tolist(), strict=True))
        else:
            assert index.remove(some, np.where(absent, 1, old)) == int((~absent).sum())
            for key in some.tolist():
                model.pop(key, None)
        check_cold_index(index, model)


def test_cold_index_lists_every_collision():
    """Keys with one fingerprint are all candidates for each other, in a stable number."""
    keys = [key_of(3, 12345, r) for r in range(50)]
    index = ColdIndex()
    index.add(array(keys), np.arange(50))
    assert all(sorted(candidates(index, key)) == list(range(50)) for key in keys[::9])
    assert candidates(index, key_of(3, 12346, 0)) == [] and candidates(index, key_of(4, 12345, 0)) == []


def test_store_tells_colliding_keys_apart(tmp_path):
    """In the store the record decides: keys of one fingerprint have their own rows, an absent one has none."""
    layout, keys = RecordLayout(1, 0), array(key_of(3, 12345, r) for r in range(40))
    with ColdStore(str(tmp_path), layout) as store:
        for version in range(3):
            part = keys[version * 5:version * 5 + 20]
            store.put(part, part[:, None].astype(np.float32), np.full(len(part), version, np.uint32))
        records, t = np.zeros((40, 1), np.float32), np.zeros(40, np.uint32)
        found = store.get(keys, records, t)
        assert found.tolist() == [True] * 30 + [False] * 10 and store.rows == 30
        assert t[:30].tolist() == [0] * 5 + [1] * 5 + [2] * 20
        assert (records[:30, 0] == keys[:30].astype(np.float32)).all() and not records[30:].any()


def test_cold_index_locations_have_40_bits():
    """The largest location comes back whole."""
    index = ColdIndex()
    places = np.array([0, 2**32 - 1, 2**32, LAST_LOCATION], np.int64)
    keys = array([0, WORD, 1, 2])
    index.add(keys, places)
    assert index.find(keys, np.zeros(4, np.int64)).tolist() == places.tolist()


def test_cold_index_move_of_a_missing_entry():
    """Moving what is not there is a programming error, and says so."""
    with pytest.raises(KeyError):
        ColdIndex().move(array([1]), np.array([0]), np.array([2]))


def test_cold_index_takes_ten_bytes_a_row():
    """100,000 rows, arriving in batches (groups grow one by one) or expected at once; measured: 9.83 and 9.90."""
    rng = np.random.default_rng(22)
    keys = np.unique(rng.integers(0, 2**64, 100_000, dtype=np.uint64))
    grown = ColdIndex()
    for begin in range(0, len(keys), 5000):
        part = keys[begin:begin + 5000]
        grown.add(part, begin + np.arange(len(part)))
        assert grown.nbytes <= bytes_for(len(grown))
    expected = ColdIndex()
    expected.expect(len(keys))
    expected.add(keys, np.arange(len(keys)))
    expected.trim()
    for index in (grown, expected):
        assert index.nbytes <= ROW_BYTES * len(keys)


# --- dedup


def plain_dedup(keys):
    """Distinct keys in order of first occurrence, the number of each occurrence's key, and the counts."""
    numbers = {}
    inverse = [numbers.setdefault(int(k), len(numbers)) for k in keys]
    return list(numbers), inverse, np.bincount(inverse, minlength=len(numbers)).tolist() if len(keys) else []


@pytest.mark.parametrize("case", ["empty", "one", "all equal", "all distinct", "zipf", "extremes", "hostile"])
def test_dedup_equals_a_dict(case):
    """Any keys, any repetition, and enough of them for the table to grow several times."""
    rng = np.random.default_rng(31)
    golden = pow(0x9E3779B97F4A7C15, -1, 2**64)
    keys = {"empty": array([]), "one": array([WORD]), "all equal": array([0] * 3000),
            "all distinct": uniform(rng, 9000), "zipf": rng.zipf(1.2, 20000).astype(np.uint64),
            "extremes": array([0, WORD, 0, 0, WORD, 1]),
            # all at home in the last bucket: products whose top 40 bits are ones
            "hostile": array(((WORD - i) * golden) & WORD for i in range(1200))}[case]
    distinct, inverse, counts = plain_dedup(keys)
    got = dedup(keys, counts=True)
    assert [a.tolist() for a in got] == [distinct, inverse, counts]
    assert (got[0][got[1]] == keys).all()
    assert [a.tolist() for a in dedup(keys)] == [distinct, inverse]


# --- checksums


def test_checksums_are_frozen():
    """Their values are part of the file format."""
    row = np.arange(1, 12, dtype=np.uint32)
    assert [int(row_check(row[:n])) for n in (4, 5, 8, 11)] == ROW_CHECKS
    assert int(fold_bytes(new_digest(), np.arange(9, dtype=np.uint8))) == BYTES_DIGEST
    assert int(fold_checks(new_digest(), row[:10].reshape(2, 5))) == CHECKS_DIGEST


def test_row_check_leaves_itself_out_and_sees_every_bit():
    """The check word does not count; any other flipped bit, and a lost trailing zero word, changes the check."""
    row = np.zeros(13, np.uint32)
    check = int(row_check(row))
    for word in range(len(row)):
        for bit in range(32):
            changed = row.copy()
            changed[word] ^= np.uint32(1 << bit)
            assert (int(row_check(changed)) == check) == (word == 2)
    assert int(row_check(row[:-1])) != check

