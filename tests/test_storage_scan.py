"""Reading whole segments by several threads: opening, taking over and verifying give what reading one by one gives."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_storage_recovery import flip

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import recovery, scan
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.segment import SegmentFile

LAYOUT = RecordLayout(3, 2)
KEEP = ColdStoreOptions(max_segments=99, stale_share=1.0)


@pytest.fixture(params=["threads", "inline"])
def small(request, monkeypatch):
    """Limits so low that some hundred rows take many reads and steps."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(scan, "_KEYS", 64)
    monkeypatch.setattr(scan, "_FEWEST_KEYS", 7)
    monkeypatch.setattr(scan, "_BLOCK_BYTES", 5 * LAYOUT.stored_bytes)
    monkeypatch.setattr(scan, "_WORTH_THREADS", 0 if request.param == "threads" else 1 << 40)


def fill(directory, segments=9, seed=3) -> dict[int, tuple[bytes, int]]:
    """A store of segments of very different sizes, whose keys overlap; returns its rows."""
    rng, rows = np.random.default_rng(seed), {}
    pool = np.append(rng.integers(0, 2**64, 700, dtype=np.uint64), np.array([0, 2**64 - 1], np.uint64))
    with ColdStore(str(directory), LAYOUT, options=KEEP) as store:
        for i in range(segments):
            keys = rng.permutation(np.unique(pool))[:(1, 500, 60, 7)[i % 4]]
            records = rng.random((len(keys), 5), np.float32)
            t = rng.integers(0, 2**32, len(keys), dtype=np.uint32)
            store.put(keys, records, t)
            rows |= {int(k): (r.tobytes(), int(n)) for k, r, n in zip(keys, records, t)}
    return rows


def rows_of(store: ColdStore) -> dict[int, tuple[bytes, int]]:
    return {int(k): (r.tobytes(), int(n)) for batch in store.iterate(64) for k, r, n in zip(*batch)}


def test_opening_finds_the_latest_row_of_every_key(tmp_path, small):
    """Index, live counts and progress, for segments whose keys overlap."""
    rows = fill(tmp_path)
    told = []
    with ColdStore(str(tmp_path), LAYOUT, options=KEEP, progress=lambda *bytes: told.append(bytes)) as store:
        assert rows_of(store) == rows and len(rows) > 500 and store.rows == len(rows)
        live = [s.live for s in store.segments()]
        in_all = sum(s.rows for s in store.segments()) * LAYOUT.stored_bytes
        assert sum(live) == len(rows) and len(live) > 4
    done = [each for each, _ in told]
    assert done == sorted(done) and told[-1] == (in_all, in_all) and {total for _, total in told} == {in_all}
    assert len(told) > 9


def test_walk_gives_every_key_once_a_segment_and_in_order(tmp_path, small):
    """Parts of a step cover its range of keys completely, and name the rows in which the keys are."""
    fill(tmp_path)
    files = [SegmentFile(str(path)) for path in sorted(tmp_path.glob("*.h5"))]
    wanted = [file_keys(file) for file in files]
    got = [np.empty(0, np.uint64) for _ in files]
    bound = -1
    for parts in scan.walk(scan.key_cursors(files)):
        assert min(int(part.keys[0]) for part in parts) > bound
        bound = max(int(part.keys[-1]) for part in parts)
        for part in parts:
            assert part.first_row == len(got[part.cursor])
            got[part.cursor] = np.append(got[part.cursor], part.keys)
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
    for file in files:
        file.close()


def file_keys(file: SegmentFile) -> np.ndarray:
    words = np.empty((file.rows, 4 + LAYOUT.words), np.uint32)
    file.read(0, words)
    return words[:, 0].astype(np.uint64) | words[:, 1].astype(np.uint64) << np.uint64(32)


@pytest.mark.parametrize("row", [0, 4, 5, 333, 499])
def test_a_damaged_row_is_named_by_all_who_read_everything(tmp_path, small, row):
    """File and row, at open, by verify and by restore; the sound files beside it are not named."""
    fill(tmp_path / "store")
    segments = sorted((tmp_path / "store").glob("*.h5"), key=os.path.getsize)
    bad = str(segments[-1])
    with SegmentFile(bad) as file:
        assert file.rows == 500
        place = file.offset + row * LAYOUT.stored_bytes
    flip(bad, place + 17)
    problems = recovery.verify(str(tmp_path / "store"))
    assert len(problems) == 1 and f"{bad}: row {row} is damaged" in problems[0]
    with pytest.raises(StorageError, match=rf"{bad}: row {row} is damaged"):
        ColdStore(str(tmp_path / "store"), LAYOUT, options=KEEP)
    with pytest.raises(StorageError, match=rf"{bad}: row {row} is damaged"):
        recovery.adopt(str(tmp_path / "new"), LAYOUT, [str(path) for path in segments])
    assert not list((tmp_path / "new").glob("*.h5"))
    flip(bad, place + 17)
    assert recovery.verify(str(tmp_path / "store")) == []


def test_keys_out_of_order_are_found_between_reads_too(tmp_path, small):
    """Rows 4 and 5 lie in different reads; each has a right check when they change places."""
    fill(tmp_path, segments=2)
    path = max(tmp_path.glob("*.h5"), key=os.path.getsize)
    with SegmentFile(str(path)) as file:
        a = file.offset + 4 * LAYOUT.stored_bytes
    b, c = a + LAYOUT.stored_bytes, a + 2 * LAYOUT.stored_bytes
    data = bytearray(path.read_bytes())
    data[a:c] = data[b:c] + data[a:b]
    path.write_bytes(data)
    with pytest.raises(StorageError, match=rf"{path}: row 5 is out of order"):
        ColdStore(str(tmp_path), LAYOUT, options=KEEP)
    assert "row 5 is out of order" in recovery.verify(str(tmp_path))[0]


def test_verify_beside_a_process_that_writes(tmp_path, small, monkeypatch):
    """Segments that vanish while they are read are no damage, and those that take their place are read."""
    fill(tmp_path)
    with ColdStore(str(tmp_path), LAYOUT, options=KEEP) as store:
        read_whole, read = scan.read_whole, []

        def meanwhile(files, progress=None):
            read.extend(os.path.basename(file.path) for file in files)
            return read_whole(files, progress)

        original = recovery.SegmentFile

        class Slow(original):
            """Opening the second of the files takes so long that the store is rewritten before."""

            def __init__(self, path, *args):
                if path.endswith("2.h5") and not read:
                    read.append("rewritten")
                    store.compact()
                super().__init__(path, *args)

        monkeypatch.setattr(recovery, "read_whole", meanwhile)
        monkeypatch.setattr(recovery, "SegmentFile", Slow)
        assert recovery.verify(str(tmp_path)) == []
        assert {os.path.basename(s.path) for s in store.segments()} <= set(read) and "rewritten" in read
