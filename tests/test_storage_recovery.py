"""Failing disks, damage, leftovers: the committed rows survive, or an error names the file. test_storage_crash.py has
crashes at any operation."""

import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from storage_common import (
    BUDGET,
    LAYOUT,
    OPTIONS,
    OneRank,
    as_dict,
    between,
    checkpoint_contents,
    contents,
    everything,
    manifest_of,
    rows_of,
)

from hpc_ctr.checkpoint import save
from hpc_ctr.errors import StorageError
from hpc_ctr.storage import chunks, fs, manifest, recovery
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.tiered import TieredStore


class Crash(BaseException):
    """The process ends here: no handler of the store may take this for an error of the disk."""


class Fault:
    """A probe for storage/fs.py that lets file operation number ``at`` fail, and all later ones if ``lasting``."""

    def __init__(self, at, make_error, lasting=False, only=None):
        self.at, self.make_error, self.lasting, self.only = at, make_error, lasting, only
        self.seen, self.paths = [], []

    def __call__(self, operation, path):
        if self.only and operation != self.only:
            return
        self.seen.append((operation, os.path.basename(path)))
        number = len(self.seen) - 1
        if number == self.at or (self.lasting and number > self.at):
            self.paths.append(path)
            raise self.make_error()

    @property
    def struck(self):
        """Whether the operation was reached."""
        return len(self.seen) > self.at

    @property
    def published(self):
        """Whether a new manifest was put in place."""
        places = [i for i, step in enumerate(self.seen) if step == PUBLISH]
        return any(i != self.at and not (self.lasting and i > self.at) for i in places)


def input_output_error():
    return OSError(errno.EIO, "Input/output error")


def disk_full():
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def inject(monkeypatch):
    """Put a Fault in place, or take it away (None)."""
    return lambda fault: monkeypatch.setattr(fs, "probe", fault)


@pytest.fixture
def fast(monkeypatch):
    """No waiting for the disk: what matters is the order of the operations."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# --- a failure at each file operation


FIRST = rows_of(range(0, 90), 1)
SECOND = rows_of(range(30, 80), 2)
BEFORE = as_dict(*FIRST)
AFTER = BEFORE | as_dict(*SECOND)
PUBLISH = ("rename", manifest.NAME)

FAILURES = {"error": (input_output_error, False), "disk full": (disk_full, True), "crash": (Crash, True)}


def copy_of(tmp_path, base, number):
    """A fresh copy of a store's directory."""
    target = tmp_path / f"try{number}"
    shutil.copytree(base, target)
    return target


def base_store(tmp_path):
    """A directory with one committed segment of FIRST."""
    with ColdStore(str(tmp_path / "base"), LAYOUT) as store:
        store.put(*FIRST)
    return tmp_path / "base"


@pytest.mark.parametrize("kind", list(FAILURES))
def test_put_fails_at_each_operation(tmp_path, inject, fast, kind):
    """After an error in a put, at whatever operation, the store holds all of it or nothing, as the manifest says."""
    base = base_store(tmp_path)
    make_error, lasting = FAILURES[kind]
    number, outcomes = 0, set()
    while True:
        directory = copy_of(tmp_path, base, number)
        store = ColdStore(str(directory), LAYOUT, options=OPTIONS)
        fault = Fault(number, make_error, lasting)
        inject(fault)
        returned = _survives(lambda store=store: store.put(*SECOND), fault)
        inject(None)
        committed = fault.published
        # rows are served even now, and the process sees what it has committed, or the state before
        if kind != "crash":
            assert everything(store) in ((AFTER,) if returned else (BEFORE, AFTER))
            again = _put_again(store, SECOND)
            assert everything(store) == AFTER or not again
        store.close()
        assert contents(directory) == (AFTER if committed or (kind != "crash" and again) else BEFORE)
        assert committed or not returned
        outcomes.add(committed)
        if not fault.struck:
            break
        shutil.rmtree(directory)
        number += 1
    assert outcomes == {False, True} and number > 10


def _survives(action, fault):
    """Run an action; whether it returned. It may raise Crash, or a StorageError that names the file, nothing else."""
    try:
        action()
    except StorageError as error:
        assert any(path in str(error) for path in fault.paths), f"{fault.paths} failed, but the error says: {error}"
        return False
    except Crash:
        return False
    return True


def _put_again(store, rows):
    """After an error: whether the store goes on; else it says that it must be reopened."""
    if store._refusal:
        with pytest.raises(StorageError, match="must be reopened after a failed commit"):
            store.put(*rows)
        return False
    store.put(*rows)
    return True


@pytest.mark.parametrize("kind", list(FAILURES))
def test_compaction_fails_at_each_operation(tmp_path, inject, fast, kind):
    """Compaction moves rows between files, so whatever happens in it changes no row."""
    base = tmp_path / "base"
    with ColdStore(str(base), LAYOUT, options=ColdStoreOptions(stale_share=1.0)) as store:
        store.put(*FIRST)
        store.put(*SECOND)
        assert len(store.segments()) == 2
    make_error, lasting = FAILURES[kind]
    number = 0
    while True:
        directory = copy_of(tmp_path, base, number)
        store = ColdStore(str(directory), LAYOUT, options=OPTIONS)
        fault = Fault(number, make_error, lasting)
        inject(fault)
        _survives(store.compact, fault)
        inject(None)
        if kind != "crash":
            assert everything(store) == AFTER
            if not store._refusal:
                store.compact()
                assert everything(store) == AFTER and all(s.live == s.rows for s in store.segments())
        store.close()
        assert contents(directory) == AFTER
        if not fault.struck:
            break
        shutil.rmtree(directory)
        number += 1
    assert number > 10


@pytest.mark.parametrize("kind", list(FAILURES))
def test_open_fails_at_each_operation(tmp_path, inject, fast, kind):
    """An opening that fails, with leftovers to remove or in a new directory, can be tried again."""
    base = base_store(tmp_path)
    (base / "manifest.json.tmp").write_bytes(b"half")
    (base / "segment-0000000077.h5").write_bytes(b"not committed")
    for start, expected in ((base, BEFORE), (None, {})):
        number = 0
        while True:
            directory = copy_of(tmp_path, start, number) if start else tmp_path / f"try{number}"
            make_error, lasting = FAILURES[kind]
            fault = Fault(number, make_error, lasting)
            inject(fault)
            _survives(lambda directory=directory: ColdStore(str(directory), LAYOUT).close(), fault)
            inject(None)
            assert contents(directory) == expected
            shutil.rmtree(directory)
            if not fault.struck:
                break
            number += 1
        assert number >= 4  # rows, what describes them on either side, manifest


@pytest.mark.parametrize("kind", list(FAILURES))
def test_restore_fails_at_each_operation(tmp_path, inject, fast, kind):
    """A restore that fails leaves the old store as it was; done again, it gives the checkpoint's rows."""
    base = base_store(tmp_path)
    with ColdStore(str(tmp_path / "checkpoint"), LAYOUT, options=ColdStoreOptions(stale_share=1.0)) as store:
        store.put(*FIRST)
        store.put(*SECOND)
        segments = store.segments()
    number = 0
    while True:
        directory = copy_of(tmp_path, base, number)
        make_error, lasting = FAILURES[kind]
        fault = Fault(number, make_error, lasting)
        inject(fault)
        _survives(lambda directory=directory: recovery.adopt(str(directory), LAYOUT, segments), fault)
        inject(None)
        assert contents(directory) == (AFTER if fault.published else BEFORE)
        recovery.adopt(str(directory), LAYOUT, segments)
        assert contents(directory) == AFTER
        if not fault.struck:
            break
        shutil.rmtree(directory)
        number += 1
    assert number > 8


def test_restore_into_a_new_directory_fails(tmp_path, inject, fast):
    """Without a manifest nothing is made up out of segments; the restore is done again."""
    base = base_store(tmp_path)
    with ColdStore(str(base), LAYOUT) as store:
        segments = store.segments()
    target = tmp_path / "new"
    fault = Fault(0, Crash, lasting=True, only="rename")
    inject(fault)
    assert not _survives(lambda: recovery.adopt(str(target), LAYOUT, segments), fault)
    inject(None)
    with pytest.raises(StorageError, match=r"no manifest\.json"):
        ColdStore(str(target), LAYOUT)
    recovery.adopt(str(target), LAYOUT, segments)
    assert contents(target) == BEFORE


@pytest.mark.parametrize("kind", ["error", "disk full"])
def test_tiered_store_at_each_operation(tmp_path, inject, fast, kind):
    """A put that has to evict fails anywhere: every row is served as it was before it or after it."""
    make_error, lasting = FAILURES[kind]
    many, update = rows_of(range(300), 1), rows_of(range(150, 450), 2)
    old, new = as_dict(*many), as_dict(*many) | as_dict(*update)
    number = 0
    while True:
        directory = tmp_path / f"try{number}"
        store = TieredStore(str(directory), LAYOUT, BUDGET, options=OPTIONS)
        store.put(*many)
        store.flush()
        fault = Fault(number, make_error, lasting)
        inject(fault)
        returned = _survives(lambda store=store: (store.put(*update), store.flush()), fault)
        inject(None)
        now = everything(store)
        assert store.nbytes <= store.budget
        assert now == new if returned else between(now, old, new)
        if not store.cold._refusal:
            store.put(*update)
            store.flush()
            assert everything(store) == new
        store.close()
        assert between(contents(directory), old, new)
        shutil.rmtree(directory)
        if not fault.struck:
            break
        number += 1
    assert number > 15


@pytest.mark.parametrize("kind", ["error", "disk full"])
def test_checkpoint_fails_at_each_operation(tmp_path, inject, fast, kind):
    """The checkpoint before is there, or the new one; the store goes on, and the checkpoint can be made again."""
    make_error, lasting = FAILURES[kind]
    number = 0
    while True:
        root = tmp_path / f"try{number}"
        store = TieredStore(str(root / "store"), LAYOUT, BUDGET, options=OPTIONS)

        def checkpoint(step, store=store, root=root):
            save.save(root / "checkpoints", OneRank(), manifest_of(step), {"dense.x": np.full(9, step)},
                      {"default": store}, keep=1)

        store.put(*FIRST)
        checkpoint(5)
        store.put(*SECOND)
        fault = Fault(number, make_error, lasting)
        inject(fault)
        returned = _survives(lambda checkpoint=checkpoint: checkpoint(10), fault)
        inject(None)
        states = [(10, [10.0] * 9, AFTER)] + [(5, [5.0] * 9, BEFORE)] * (not returned)
        assert checkpoint_contents(root / "checkpoints") in states
        assert everything(store) == AFTER
        if store.cold._refusal:
            with pytest.raises(StorageError, match="must be reopened"):
                checkpoint(10)
        else:
            checkpoint(10)
            assert checkpoint_contents(root / "checkpoints") == states[0]
        store.close()
        shutil.rmtree(root)
        if not fault.struck:
            break
        number += 1
    assert number > 40


def test_after_a_failed_publication_the_store_must_be_reopened(tmp_path, inject):
    """Whether the manifest is the new one cannot be known then: writes are refused, reads are served."""
    with ColdStore(str(tmp_path / "store"), LAYOUT) as store:
        store.put(*FIRST)
        recorder = Fault(10**9, input_output_error)
        inject(recorder)
        store.put(*SECOND)
        place = recorder.seen.index(PUBLISH)
        inject(Fault(place + 1, input_output_error))
        with pytest.raises(StorageError, match="input/output error"):
            store.put(*rows_of(range(5), 3))
        inject(None)
        with pytest.raises(StorageError, match="must be reopened after a failed commit"):
            store.put(*rows_of(range(5), 3))
        assert everything(store) == AFTER
    assert contents(tmp_path / "store") == AFTER | as_dict(*rows_of(range(5), 3))


def test_order_of_operations(tmp_path, inject):
    """A file is synced before it gets its name, and its name is synced before the manifest refers to it."""
    with ColdStore(str(tmp_path / "store"), LAYOUT) as store:
        store.put(*FIRST)
        recorder = Fault(10**9, input_output_error)
        inject(recorder)
        store.put(*SECOND)
        inject(None)
    important = [step for step in recorder.seen if step[0] in ("sync", "rename", "remove")]
    segment = "segment-0000000002.h5"
    assert important[:6] == [("sync", segment + ".tmp"), ("rename", segment), ("sync", "store"),
                             ("sync", "manifest.json.tmp"), PUBLISH, ("sync", "store")]
    writes = [i for i, step in enumerate(recorder.seen) if step == ("write", segment + ".tmp")]
    assert writes and writes[-1] < recorder.seen.index(important[0])


# --- a full disk


def test_disk_full(tmp_path, inject):
    """One clear sentence; the rows are still served, and when there is room again the store goes on."""
    with TieredStore(str(tmp_path / "store"), LAYOUT, BUDGET) as store:
        first, second = rows_of(range(700), 1), rows_of(range(700), 2)
        store.put(*first)
        inject(Fault(0, disk_full, lasting=True, only="write"))
        with pytest.raises(StorageError, match=r"no space left on the disk of .*segment.*storage\.dir"):
            store.put(*second)
        with pytest.raises(StorageError, match="no space left"):
            store.flush()
        rows = everything(store)
        assert between(rows, as_dict(*first), as_dict(*second))
        records, t = np.empty((700, LAYOUT.floats), np.float32), np.empty(700, np.uint32)
        assert store.get(first[0], records, t).all()
        assert as_dict(first[0], records, t) == rows
        assert not [name for name in os.listdir(tmp_path / "store") if name.endswith(".tmp")]
        inject(None)
        store.put(*second)
    assert contents(tmp_path / "store") == as_dict(*second)


@pytest.mark.parametrize("chunks_written", [1, 3])
def test_disk_gets_full_within_a_write(tmp_path, monkeypatch, fast, chunks_written):
    """A write of which a part got through is an error like any other, whichever write it is."""
    write, number = os.pwrite, 0
    first, second = FIRST, SECOND
    if chunks_written > 1:  # a thread writes them while the next one is filled
        monkeypatch.setattr(chunks, "_CHUNK_BYTES", 1)
        first, second = rows_of(range(1400), 1), rows_of(range(700, 2000), 2)
    before, after = as_dict(*first), as_dict(*first) | as_dict(*second)
    while True:
        with ColdStore(str(tmp_path / f"try{number}"), LAYOUT, options=ColdStoreOptions(stale_share=1.0)) as store:
            store.put(*first)
            left = [number]

            def full(descriptor, data, offset, left=left):
                left[0] -= 1
                if left[0] == -1:
                    return write(descriptor, data[:len(data) // 2], offset)
                if left[0] < -1:
                    raise disk_full()
                return write(descriptor, data, offset)

            monkeypatch.setattr(os, "pwrite", full)
            try:
                store.put(*second)
                done = left[0] >= 0
                assert done, "half a write was taken for a whole one"
            except StorageError as error:
                assert "no space left on the disk of" in str(error)
                done = False
            monkeypatch.setattr(os, "pwrite", write)
            assert everything(store) == (after if done else before)
            store.put(*second)
            assert everything(store) == after
        assert contents(tmp_path / f"try{number}") == after
        if done:
            break
        number += 1
    assert number >= 3 + chunks_written  # of rows, what describes them on either side, manifest


@pytest.mark.parametrize("trouble", ["none", "no direct writes", "larger blocks"])
def test_rows_in_chunks(tmp_path, monkeypatch, trouble):
    """A segment of several chunks is the same file however it was written, whole chunks around the page cache where
    the file system can."""
    written = rows_of(range(1400), 1)
    with ColdStore(str(tmp_path / "at once"), LAYOUT) as store:
        store.put(*written)
        digest = store.segments()[0].digest
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 1)
    opened, write = [], os.pwrite
    open_direct = fs.open_direct_write

    def recording(path):
        opened.append(-1 if trouble == "no direct writes" else open_direct(path))
        return opened[-1]

    def choosy(descriptor, data, offset):
        if descriptor in opened and len(data) % fs.DIRECT_BYTES == 0:  # the number may serve another file by now
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data, offset)

    monkeypatch.setattr(fs, "open_direct_write", recording)
    if trouble == "larger blocks":
        monkeypatch.setattr(os, "pwrite", choosy)
    with ColdStore(str(tmp_path / "chunks"), LAYOUT) as store:
        store.put(*written)
        assert store.segments()[0].digest == digest and len(opened) == 1
        assert everything(store) == as_dict(*written) and store.verify() == []
    names = [sorted(os.listdir(tmp_path / name)) for name in ("at once", "chunks")]
    segment = next(name for name in names[0] if name.startswith("segment"))
    assert names[0] == names[1]
    assert (tmp_path / "at once" / segment).read_bytes() == (tmp_path / "chunks" / segment).read_bytes()


def test_get_on_a_full_disk(tmp_path, inject):
    """Reading needs no room: rows are served even where caching them would push changed rows to the disk."""
    rows = rows_of(range(700), 1)
    with TieredStore(str(tmp_path / "store"), LAYOUT, BUDGET) as store:
        store.put(*rows)
        records, t = np.empty((700, LAYOUT.floats), np.float32), np.empty(700, np.uint32)
        for _ in range(40):     # the cached rows, all of them dirty, get colder than any that is read now
            store.get(np.array([10**6], np.uint64), records, t)
        fault = Fault(0, disk_full, lasting=True, only="write")
        inject(fault)
        cold = rows[0][store.cache.lookup(rows[0]) < 0]
        for begin in range(0, len(cold), 50):
            part = cold[begin:begin + 50]
            assert store.get(part, records, t).all()
            assert records[:len(part)].tobytes() == rows_of(part, 1)[1].tobytes()
        assert fault.struck and everything(store) == as_dict(*rows)
        with pytest.raises(StorageError, match="no space left"):
            store.flush()
        inject(None)
    assert contents(tmp_path / "store") == as_dict(*rows)


def test_read_error(tmp_path, inject):
    """A failing read names the file; later reads work again."""
    with ColdStore(str(tmp_path / "store"), LAYOUT) as store:
        store.put(*FIRST)
        records, t = np.empty((90, LAYOUT.floats), np.float32), np.empty(90, np.uint32)
        inject(Fault(0, input_output_error, only="read"))
        with pytest.raises(StorageError, match=r"failed to read .*segment-0000000001\.h5"):
            store.get(FIRST[0], records, t)
        inject(None)
        assert store.get(FIRST[0], records, t).all() and records.tobytes() == FIRST[1].tobytes()


# --- leftovers and strangers


def test_leftovers_are_removed(tmp_path):
    """Temporary files and segments that no manifest names go; files of others stay."""
    base = base_store(tmp_path)
    for name in ("manifest.json.tmp", "segment-0000000009.h5.tmp", "segment-0000000009.h5"):
        (base / name).write_bytes(b"x")
    (base / "notes.txt").write_text("mine")
    assert contents(base, clean=False) == BEFORE
    assert sorted(os.listdir(base)) == ["manifest.json", "notes.txt", "segment-0000000001.h5", "store.lock"]


def test_two_openers(tmp_path):
    """A second opening is refused while the first lasts, in this process and in a restore."""
    base = base_store(tmp_path)
    with ColdStore(str(base), LAYOUT) as store:
        for second in (lambda: ColdStore(str(base), LAYOUT), lambda: recovery.adopt(str(base), LAYOUT, [])):
            with pytest.raises(StorageError, match="open already"):
                second()
        assert everything(store) == BEFORE
    assert contents(base) == BEFORE


OPEN = """
import sys
from storage_common import LAYOUT, everything
from hpc_ctr.errors import StorageError
from hpc_ctr.storage.cold import ColdStore
try:
    with ColdStore(sys.argv[1], LAYOUT) as store:
        print(len(everything(store)), "rows")
except StorageError as error:
    print(error)
"""


def test_two_processes(tmp_path):
    """A second process is told that the store is open, and changes nothing; afterwards it may have it."""
    base = base_store(tmp_path)

    def other():
        return subprocess.run([sys.executable, "-c", OPEN, str(base)], capture_output=True, text=True, timeout=100,
                              cwd=os.path.dirname(__file__), check=True).stdout

    with ColdStore(str(base), LAYOUT) as store:
        (base / "manifest.json.tmp").write_bytes(b"a put of the first process that is under way")
        assert other() == (f"the store {base} is open already, here or in another process: close it, or give each "
                           "run its own storage.dir\n")
        assert (base / "manifest.json.tmp").exists() and everything(store) == BEFORE
    assert other() == "90 rows\n"
    assert contents(base) == BEFORE


@pytest.mark.parametrize("other", [RecordLayout(2, 3), RecordLayout(3, 3), RecordLayout(2, 4, np.float64)])
def test_wrong_layout_is_refused(tmp_path, other):
    """Both layouts are named, and the store is not touched."""
    base = base_store(tmp_path)
    named = other.describe().replace("+", ".")
    with pytest.raises(StorageError, match=f"of 2 . 4 float32 .*not to 'default' of {named}"):
        ColdStore(str(base), other)
    with pytest.raises(StorageError, match="differ from the run that wrote it"):
        recovery.adopt(str(tmp_path / "new"), other, [str(base / "segment-0000000001.h5")])
    assert contents(base) == BEFORE


def test_other_table_is_refused(tmp_path):
    """A directory belongs to one table."""
    base = base_store(tmp_path)
    with pytest.raises(StorageError, match="belongs to table 'default'"):
        ColdStore(str(base), LAYOUT, "users")


def test_closed_store(tmp_path):
    """Using a closed store is an error with a sentence; closing twice is none."""
    store = ColdStore(str(tmp_path / "store"), LAYOUT)
    store.close()
    store.close()
    with pytest.raises(StorageError, match="is closed"):
        store.put(*FIRST)
    with pytest.raises(StorageError, match="is closed"):
        store.get(FIRST[0], FIRST[1].copy(), FIRST[2].copy())


# --- damage


def flip(path, offset, mask=0x10):
    """Change one byte of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_any_damaged_byte_is_found(tmp_path):
    """Each byte of a segment, changed, is found by ``verify`` of the open store and refused at open. Where it is part
    of a row, that row is named, by ``get`` too; all other rows are served."""
    rows = rows_of(range(24), 1)
    whole = as_dict(*rows)
    records, t = np.empty((24, LAYOUT.floats), np.float32), np.empty(24, np.uint32)
    with ColdStore(str(tmp_path / "store"), LAYOUT, options=ColdStoreOptions(gap_bytes=0)) as store:
        store.put(*rows)
        path, file = store.segments()[0].path, store._segments[0].file
        for offset in range(file.nbytes):
            flip(path, offset, 1 << offset % 8)
            problems = store.verify()
            assert len(problems) == 1 and path in problems[0], f"byte {offset} of {path}: {problems}"
            row = (offset - file.offset) // LAYOUT.stored_bytes
            others = rows[0][rows[0] != row]
            if 0 <= row < 24:
                assert f"row {row} is damaged" in problems[0]
                with pytest.raises(StorageError, match=rf"{path}: row {row} is damaged"):
                    store.get(rows[0], records, t)
            if offset % 5 == 0:
                assert store.get(others, records, t).all()
                assert as_dict(others, records[:len(others)], t[:len(others)]) == {int(k): whole[int(k)] for k in others}
            flip(path, offset, 1 << offset % 8)
        assert store.verify() == []
    for offset in range(0, file.nbytes, 11):
        flip(path, offset)
        with pytest.raises(StorageError, match=r"segment-0000000001\.h5"):
            ColdStore(str(tmp_path / "store"), LAYOUT)
        flip(path, offset)
    assert contents(tmp_path / "store") == whole


def test_damaged_row_is_found_when_it_is_read(tmp_path):
    """``get`` of a damaged row names file and row; the other rows of the file are still served."""
    base = base_store(tmp_path)
    records, t = np.empty((1, LAYOUT.floats), np.float32), np.empty(1, np.uint32)
    with ColdStore(str(base), LAYOUT, options=ColdStoreOptions(gap_bytes=0)) as store:
        path = store.segments()[0].path
        offset = store._segments[0].file.offset
        for row, byte in ((17, 0), (17, 9), (17, 13), (17, 16), (17, LAYOUT.stored_bytes - 1)):
            place = offset + row * LAYOUT.stored_bytes + byte
            flip(path, place)
            with pytest.raises(StorageError, match=rf"{path}: row {row} is damaged"):
                store.get(np.array([row], np.uint64), records, t)
            assert store.get(np.array([row + 1], np.uint64), records, t).all()
            with pytest.raises(StorageError, match=f"row {row} is damaged"):
                everything(store)
            flip(path, place)


def test_damaged_row_through_the_tiers(tmp_path):
    """A damaged cold row is an error of the tiered store too, never another value."""
    with TieredStore(str(tmp_path / "store"), LAYOUT, BUDGET) as store:
        store.put(*rows_of(range(500), 1))
        store.flush()
        cold = [k for k in range(500) if store.cache.lookup(np.array([k], np.uint64))[0] < 0]
        records, t = np.empty((1, LAYOUT.floats), np.float32), np.empty(1, np.uint32)
        location = int(store.cold.locate(np.array([cold[0]], np.uint64))[0])
        segment = [s for s in store.cold._segments if s.base <= location][-1]
        flip(segment.file.path, segment.file.offset + (location - segment.base) * LAYOUT.stored_bytes + 20)
        with pytest.raises(StorageError, match=rf"{segment.file.path}: row {location - segment.base} is damaged"):
            store.get(np.array([cold[0]], np.uint64), records, t)
        assert len(store.verify()) == 1


def test_rows_in_the_wrong_place_are_found(tmp_path):
    """Two rows that changed places, each with a right check: the order of the keys, or the digest, gives it away."""
    base = base_store(tmp_path)
    path, size = base / "segment-0000000001.h5", LAYOUT.stored_bytes
    with ColdStore(str(base), LAYOUT) as store:
        offset = store._segments[0].file.offset
    data = bytearray(path.read_bytes())
    a, b = offset + 3 * size, offset + 4 * size
    data[a:a + size], data[b:b + size] = data[b:b + size], data[a:a + size]
    path.write_bytes(data)
    assert "out of order" in recovery.verify(str(base))[0]
    with pytest.raises(StorageError, match="out of order"):
        ColdStore(str(base), LAYOUT)


def test_older_form_of_a_file_is_found(tmp_path):
    """A segment replaced by a sound file of other rows is not the committed one."""
    base = base_store(tmp_path)
    with ColdStore(str(tmp_path / "other"), LAYOUT) as store:
        store.put(*rows_of(range(0, 90), 7))
    shutil.copy(tmp_path / "other" / "segment-0000000001.h5", base)
    assert "digest is not the one in the manifest" in recovery.verify(str(base))[0]
    with pytest.raises(StorageError, match="not the file that the manifest names"):
        ColdStore(str(base), LAYOUT)


@pytest.mark.parametrize("name", ["segment-0000000001.h5", "manifest.json"])
def test_truncated_file(tmp_path, name):
    """A file that lost its end, however much of it, is named, at open and by verify."""
    base = base_store(tmp_path)
    path = base / name
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 61), len(whole) - 1):
        os.truncate(path, length)
        problems = recovery.verify(str(base))
        assert len(problems) == 1 and str(path) in problems[0], f"{length} bytes: {problems}"
        with pytest.raises(StorageError, match=name.replace(".", r"\.")):
            ColdStore(str(base), LAYOUT)
        path.write_bytes(whole)
    assert contents(base) == BEFORE


def test_truncation_under_an_open_store(tmp_path):
    """Reading past the new end is an error, not zeros."""
    base = base_store(tmp_path)
    with ColdStore(str(base), LAYOUT) as store:
        os.truncate(store.segments()[0].path, store._segments[0].file.offset + 100)
        with pytest.raises(StorageError, match="truncated"):
            store.get(FIRST[0], FIRST[1].copy(), FIRST[2].copy())


def test_lost_segment_or_manifest(tmp_path):
    """What was removed by hand is named."""
    base = base_store(tmp_path)
    (base / "segment-0000000001.h5").rename(tmp_path / "kept.h5")
    with pytest.raises(StorageError, match=r"segment-0000000001\.h5: it is not there"):
        ColdStore(str(base), LAYOUT)
    (tmp_path / "kept.h5").rename(base / "segment-0000000001.h5")
    (base / "manifest.json").unlink()
    with pytest.raises(StorageError, match=r"holds segments .* but no manifest\.json"):
        ColdStore(str(base), LAYOUT)


def test_any_damaged_byte_of_the_manifest(tmp_path):
    """The manifest carries its own digest: no changed byte goes unnoticed."""
    base = base_store(tmp_path)
    path = base / "manifest.json"
    for offset in range(path.stat().st_size):
        flip(path, offset, 1)
        problems = recovery.verify(str(base))
        assert len(problems) == 1 and str(path) in problems[0]
        if offset % 25 == 0:
            with pytest.raises(StorageError, match=r"manifest\.json"):
                ColdStore(str(base), LAYOUT)
        flip(path, offset, 1)
    assert contents(base) == BEFORE
