"""Segments: what is in the files, reading several of them, handing them on, and how much disk they take."""

import errno
import os
import re
import shutil
import subprocess

import h5py
import numpy as np
import pytest

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.segment import SegmentFile, iter_segment_rows, live_rows
from hpc_ctr.storage.tiered import TieredStore, budget_for

LAST_KEY = 2**64 - 1
LAYOUTS = [RecordLayout(4, 8), RecordLayout(3, 0), RecordLayout(0, 5), RecordLayout(3, 2, np.float64)]
MASK = 0xFFFFFFFF


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Durability is not what these tests are about."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def some_rows(seed, n, layout):
    """Distinct keys in random order, the smallest and the largest among them; records of random bits; t."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**64, n - 2, dtype=np.uint64)
    keys = rng.permutation(np.unique(np.append(keys, np.array([0, LAST_KEY], np.uint64))))
    words = rng.integers(0, 2**32, (len(keys), layout.words), dtype=np.uint32)
    return keys, words.view(layout.dtype), rng.integers(0, 2**32, len(keys), dtype=np.uint32)


def as_dict(keys, records, t):
    """key -> (bytes of the record, t)."""
    return {int(k): (r.tobytes(), int(s)) for k, r, s in zip(keys, records, t, strict=True)}


def together(batches):
    """All rows of an iterator of batches, each key of which must come once and above the one before."""
    rows, last = {}, -1
    for keys, records, t in batches:
        assert int(keys[0]) > last and (np.diff(keys.astype(object)) > 0).all()
        last = int(keys[-1])
        rows.update(as_dict(keys, records, t))
    return rows


def budget(layout, cached=200, total=5000):
    """Host memory for a small cache."""
    return budget_for(layout, cached, total)


# --- one file


def plain_row_check(words):
    """The check of a stored row, from its description in docs/storage_format.md."""

    def rotate(value, bits):
        return (value << bits | value >> (32 - bits)) & MASK

    def step(lane, word):
        return rotate(lane ^ (word * 0xCC9E2D51 & MASK), 13) * 0x1B873593 & MASK

    seed = 0x9747B28C
    lanes = [step(seed, words[0]), step(seed + 0xCC9E2D51 & MASK, words[1]),
             step(seed + 0x1B873593 & MASK, words[3]), seed + 0x85EBCA6B + len(words) & MASK]
    payload = words[4:]
    whole = len(payload) // 4 * 4
    for i, word in enumerate(payload):
        lane = i % 4 if i < whole else 0
        lanes[lane] = step(lanes[lane], word)
    h = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe().replace(" ", ""))
def test_plain_h5py_reads_what_was_put(tmp_path, layout):
    """A segment is an ordinary HDF5 file with the rows sorted by key, described by its attributes."""
    keys, records, t = some_rows(1, 300, layout)
    with ColdStore(str(tmp_path), layout, "users") as store:
        store.put(keys, records, t)
        path = store.segments()[0].path
    order = np.argsort(keys)
    with h5py.File(path, "r") as file:
        assert list(file) == ["rows"]
        data, rows = file["rows"], file["rows"][...]
        assert data.chunks is None and data.compression is None
        attributes = {name: file.attrs[name] for name in file.attrs}
        offset = data.id.get_offset()
    assert attributes == {"format": b"hpc_ctr segment", "version": 1, "table": b"users", "rows": len(keys),
                          "width": layout.width, "state": layout.state, "dtype": layout.dtype.name.encode()}
    names = ["key", "check", "t"] + ["x"] * (layout.width > 0) + ["state"] * (layout.state > 0)
    assert list(rows.dtype.names) == names and rows.dtype.itemsize == 16 + layout.record_bytes
    assert (rows["key"] == keys[order]).all() and (rows["t"] == t[order]).all()
    if layout.width:
        assert rows["x"].tobytes() == records[order, :layout.width].tobytes()
    if layout.state:
        assert rows["state"].tobytes() == records[order, layout.width:].tobytes()
    words = np.frombuffer(open(path, "rb").read(), np.uint32, len(keys) * (4 + layout.words), offset)
    words = words.reshape(len(keys), -1)
    assert words.tobytes() == rows.tobytes(), "the rows lie as they are at the dataset's offset"
    for row, check in zip(words[::20], rows["check"][::20], strict=True):
        assert plain_row_check(row.tolist()) == check


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_h5dump_reads_what_was_put(tmp_path, dtype):
    """The HDF5 library's own tool, which knows nothing of Python, prints the same attributes and rows."""
    layout = RecordLayout(2, 3, dtype)
    keys, _, t = some_rows(4, 50, layout)
    records = np.random.default_rng(4).normal(size=(len(keys), layout.floats)).astype(dtype)
    with ColdStore(str(tmp_path), layout, "users") as store:
        store.put(keys, records, t)
        path = store.segments()[0].path
    command = ["h5dump", "-y", "-w", "0", "-m", "%.17g", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    described, _, rows = text.partition('DATASET "rows"')
    found = re.findall(r'ATTRIBUTE "(\w+)" .*?DATA \{\s*"?([^"\n]*)"?\n', described, re.DOTALL)
    assert dict(found) == {"format": "hpc_ctr segment", "version": "1", "table": "users", "rows": str(len(keys)),
                           "width": "2", "state": "3", "dtype": layout.dtype.name}
    numbers = re.findall(r"-?[\d.]+(?:e[-+]?\d+)?", rows[rows.index("DATA {"):])
    assert len(numbers) == len(keys) * (3 + layout.floats)
    got = {int(row[0]): (np.array(row[3:], dtype).tobytes(), int(row[2])) for row in zip(*[iter(numbers)] * 8)}
    assert got == as_dict(keys, records, t)


def test_rows_begin_at_a_page(tmp_path):
    """The rows of a file of at least a page begin at a multiple of 4096 bytes, so that O_DIRECT could read them."""
    layout = RecordLayout(4, 8)
    with ColdStore(str(tmp_path), layout) as store:
        store.put(*some_rows(1, 300, layout))
        with SegmentFile(store.segments()[0].path) as file:
            assert file.offset % 4096 == 0


def test_segments_are_the_same_bytes(tmp_path):
    """The same rows give the same file, in whatever order they were put."""
    layout = RecordLayout(4, 8)
    keys, records, t = some_rows(2, 100, layout)
    files = []
    for name, order in (("a", np.arange(len(keys))), ("b", np.arange(len(keys))[::-1])):
        with ColdStore(str(tmp_path / name), layout) as store:
            store.put(keys[order], records[order], t[order])
            files.append(open(store.segments()[0].path, "rb").read())
    assert files[0] == files[1]


# --- several files


def overlapping(tmp_path, layout, count=4):
    """Paths of segments with common keys, and what they hold together, later ones winning."""
    rng = np.random.default_rng(3)
    keys, records, t = some_rows(3, 900, layout)
    paths, rows = [], {}
    for i in range(count):
        part = rng.permutation(len(keys))[:400]
        data = keys[part], records[rng.permutation(part)], t[part] + np.uint32(i)
        with ColdStore(str(tmp_path / f"from{i}"), layout) as store:
            store.put(*data)
            paths.append(store.segments()[0].path)
        rows.update(as_dict(*data))
    return paths, rows


@pytest.mark.parametrize("batch_rows", [16, 100, 65536])
def test_live_rows_of_several_segments(tmp_path, batch_rows):
    """Each key once, ascending, the latest segment winning, for small and large batches."""
    layout = RecordLayout(4, 8)
    paths, rows = overlapping(tmp_path, layout)
    assert together(live_rows(paths, batch_rows, layout=layout)) == rows
    assert together(live_rows(paths[:1], batch_rows)) == together(iter_segment_rows(paths[0], batch_rows))
    assert list(live_rows([])) == []


def test_live_rows_of_a_key_range(tmp_path):
    """Both ends of the range are part of it, whether they are keys of the files or not."""
    paths, rows = overlapping(tmp_path, RecordLayout(4, 8))
    keys = sorted(rows)
    ends = [(0, LAST_KEY), (0, 0), (1, LAST_KEY - 1), (LAST_KEY, LAST_KEY), (keys[100], keys[200]),
            (keys[100] + 1, keys[200] - 1), (keys[100], keys[100]), (keys[5] + 1, keys[5] + 1), (2**63, LAST_KEY)]
    for first, last in ends:
        expected = {k: row for k, row in rows.items() if first <= k <= last}
        assert together(live_rows(paths, 64, first, last)) == expected


def test_segments_of_different_tables_are_not_mixed(tmp_path):
    """Files of two layouts cannot be read as one table."""
    paths = []
    for name, layout in (("a", RecordLayout(4, 8)), ("b", RecordLayout(4, 4))):
        with ColdStore(str(tmp_path / name), layout) as store:
            store.put(*some_rows(4, 10, layout))
            paths.append(store.segments()[0].path)
    with pytest.raises(StorageError, match="not of one table"):
        list(live_rows(paths))
    with pytest.raises(StorageError, match="differ from the run that wrote it"):
        list(live_rows(paths[1:], layout=RecordLayout(4, 8)))


# --- handing segments on


def everything(store):
    """All rows of a store."""
    rows = {}
    for batch in store.iterate(100):
        rows.update(as_dict(*batch))
    return rows


def saved(tmp_path, layout):
    """A store with several segments, flushed and closed: its segments and its rows."""
    keys, records, t = some_rows(5, 1200, layout)
    with TieredStore(str(tmp_path / "saved"), layout, budget(layout)) as store:
        for begin in range(0, 1200, 300):
            store.put(keys[begin:begin + 400], records[begin:begin + 400], t[begin:begin + 400])
            store.flush()
        segments = store.segments()
        rows = everything(store)
    assert len(segments) > 2 and len(rows) == len(keys)
    return segments, rows


@pytest.mark.parametrize("way", ["link", "copy"])
@pytest.mark.parametrize("digests", [True, False])
def test_restore(tmp_path, monkeypatch, way, digests):
    """A store of a checkpoint's segments: linked where that is possible, else copied; what was there is gone."""
    layout = RecordLayout(4, 8)
    segments, rows = saved(tmp_path, layout)
    target = str(tmp_path / "restored")
    with TieredStore(target, layout, budget(layout)) as store:
        store.put(*some_rows(6, 50, layout))
    if way == "copy":
        monkeypatch.setattr(os, "link", _other_file_system)
    given = segments if digests else [s.path for s in segments]
    with TieredStore.restore(target, given, layout, budget(layout)) as store:
        assert store.rows == len(rows) and everything(store) == rows and store.verify() == []
        names = sorted(name for name in os.listdir(target) if name.endswith(".h5"))
        assert names == sorted(os.path.basename(s.path) for s in store.segments())
        links = {os.stat(s.path).st_nlink for s in store.segments()}
        assert links == ({2} if way == "link" else {1})
        # the store goes on by itself: the checkpoint's files stay as they are
        store.put(*some_rows(7, 900, layout))
        store.flush()
        store.cold.compact()
    assert together(live_rows([s.path for s in segments])) == rows


def _other_file_system(source, target):
    raise OSError(errno.EXDEV, "Invalid cross-device link", source)


def test_restore_of_nothing(tmp_path):
    """A checkpoint without rows gives an empty store, whatever the directory held."""
    layout = RecordLayout(4, 8)
    saved(tmp_path, layout)
    with TieredStore.restore(str(tmp_path / "saved"), [], layout, budget(layout)) as store:
        assert store.rows == 0 and store.segments() == []


def test_restore_from_own_files(tmp_path):
    """Going back to earlier segments of the very same directory."""
    layout = RecordLayout(4, 8)
    segments, rows = saved(tmp_path, layout)
    with TieredStore.restore(str(tmp_path / "saved"), segments, layout, budget(layout)) as store:
        assert everything(store) == rows


def test_restore_of_a_damaged_segment(tmp_path):
    """The digest of the checkpoint's manifest is checked, and the file named."""
    layout = RecordLayout(4, 8)
    segments, _ = saved(tmp_path, layout)
    victim = segments[1].path
    with open(victim, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StorageError, match=r"segment-\d{10}\.h5"):
        TieredStore.restore(str(tmp_path / "restored"), segments, layout, budget(layout))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_load_for_another_rank_count(tmp_path, ranks):
    """Each of N ranks takes its shards' range of keys; together they hold every row once."""
    layout = RecordLayout(4, 8)
    segments, rows = saved(tmp_path, layout)
    bounds = [(1024 * i // ranks) << 54 for i in range(ranks + 1)]
    total = {}
    for rank in range(ranks):
        with TieredStore(str(tmp_path / f"rank{rank}"), layout, budget(layout)) as store:
            count = store.load(segments, bounds[rank], bounds[rank + 1] - 1)
            mine = everything(store)
            assert count == len(mine) == store.rows
            assert all(bounds[rank] <= key < bounds[rank + 1] for key in mine)
            assert not set(mine) & set(total)
            total.update(mine)
    assert total == rows


# --- disk


def disk_bytes(directory):
    """Bytes of all files of a directory."""
    return sum(entry.stat().st_size for entry in os.scandir(directory))


@pytest.mark.parametrize("max_segments", [96, 4], ids=["stale only", "few segments"])
def test_disk_after_overwrites(tmp_path, max_segments):
    """After each of 20 rounds that overwrite half of the rows: less than 2 x live + one segment."""
    layout, n = RecordLayout(4, 8), 6000
    options = ColdStoreOptions(max_segments=max_segments, output_rows=2000)
    keys, records, t = some_rows(8, n, layout)
    rng = np.random.default_rng(9)
    with ColdStore(str(tmp_path), layout, options=options) as store:
        store.put(keys, records, t)
        rows = as_dict(keys, records, t)
        for turn in range(20):
            part = rng.permutation(len(keys))[:n // 2]
            fresh = rng.integers(0, 2**32, (len(part), layout.words), dtype=np.uint32).view(np.float32)
            store.put(keys[part], fresh, t[part] + np.uint32(turn))
            rows.update(as_dict(keys[part], fresh, t[part] + np.uint32(turn)))
            live = len(keys) * layout.stored_bytes
            largest = max(s.nbytes for s in store.segments())
            assert disk_bytes(tmp_path) <= 2 * live + largest
            assert store.rows == len(keys) == sum(s.live for s in store.segments())
            if turn % 5 == 4:
                assert everything(store) == rows
        assert store.counters.rows_compacted > 0
        store.compact()
        assert all(s.live == s.rows for s in store.segments())
        assert everything(store) == rows and store.verify() == []


def test_reads_within_a_compaction(tmp_path, monkeypatch):
    """Whatever compaction has written, committed and moved so far, every row is served as it was put."""
    layout = RecordLayout(4, 8)
    keys, records, t = some_rows(11, 1200, layout)
    rng = np.random.default_rng(12)
    with ColdStore(str(tmp_path), layout, options=ColdStoreOptions(stale_share=1.0)) as store:
        store.put(keys, records, t)
        for _ in range(4):
            part = rng.permutation(len(keys))[:500]
            records[part], t[part] = records[rng.permutation(part)], t[part] + np.uint32(1)
            store.put(keys[part], records[part], t[part])
        looks, reading = {"files": 0, "moves": 0}, False

        def look(where):
            nonlocal reading
            if reading:
                return
            reading = True
            back, back_t = np.zeros_like(records), np.zeros_like(t)
            assert store.get(keys, back, back_t).all()
            assert back.tobytes() == records.tobytes() and back_t.tobytes() == t.tobytes()
            looks[where] += 1
            reading = False

        # outside of a commit, that is: what a commit does is one step for those who read
        monkeypatch.setattr(fs, "probe", lambda operation, path: look("files") if path.endswith(".h5.tmp") else None)
        store.on_move = lambda moved, old, locations: look("moves")
        store.options = ColdStoreOptions(output_rows=200)
        store.compact()
        monkeypatch.setattr(fs, "probe", None)
        assert looks["moves"] == 4 and len(store.segments()) == 5 and looks["files"] > 20
        assert everything(store) == as_dict(keys, records, t)


def test_row_by_row_updates_do_not_pile_up_files(tmp_path):
    """Many small puts: the number of files stays near the limit."""
    layout = RecordLayout(2, 0)
    options = ColdStoreOptions(max_segments=8)
    with ColdStore(str(tmp_path), layout, options=options) as store:
        rows = {}
        for i in range(60):
            data = some_rows(100 + i, 5, layout)
            store.put(*data)
            rows.update(as_dict(*data))
            assert len(store.segments()) <= 9
        assert everything(store) == rows and store.verify() == []
