"""Segments: immutable HDF5 files of rows sorted by key.

`docs/storage_format.md` gives the layout byte by byte. h5py makes and reads what describes the rows;
the rows are written and read around the HDF5 library, at the dataset's offset in the file.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import h5py
import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.kernels.checksum import first_bad_row, fold_bytes, fold_checks, new_digest
from hpc_ctr.kernels.rows import row_keys, unpack_rows
from hpc_ctr.storage import fs
from hpc_ctr.storage.chunks import ChunkWriter
from hpc_ctr.storage.record import RecordLayout

if TYPE_CHECKING:
    from hpc_ctr.storage.scan import KeyPart

FORMAT = "hpc_ctr segment"
VERSION = 1
LIFECYCLE_VERSION = 2  # of segments whose rows have a lifecycle
DATASET = "rows"
LAST_KEY = 2**64 - 1


@dataclass(frozen=True)
class SegmentInfo:
    """A committed segment: absolute path, rows in the file, live rows, digest, bytes of the file."""

    path: str
    rows: int
    live: int
    digest: str
    nbytes: int


class SegmentWriter:
    """Writes one segment of ``rows`` rows, ascending by key, under a temporary name.

    ``shorten`` says that it becomes fewer; ``finish`` syncs it and gives it its name; leaving the ``with`` block without
    that removes what was written. deletions: the rows are keys that were deleted (only with a lifecycle). Rows go to the
    disk around the page cache, a chunk of about 2 MiB being written while the next one is filled.
    """

    def __init__(self, path: str, layout: RecordLayout, table: str, rows: int, deletions: bool = False):
        self.path, self.layout, self.rows, self.written = path, layout, rows, 0
        self._temporary = path + fs.TEMPORARY
        self._state = new_digest()
        self._describe = lambda rows: _description(layout, table, rows, deletions)
        self._head, self._tail = self._describe(rows)
        self._descriptor = fs.create(self._temporary)
        self._direct = -1
        self._chunks: ChunkWriter | None = None
        try:
            self._nbytes = len(self._head) + rows * layout.stored_bytes + len(self._tail)
            fs.truncate(self._descriptor, self._temporary, self._nbytes)
            self._chunks = ChunkWriter(self._write, len(self._head), layout.stored_bytes, rows)
            if self._chunks.several:
                self._direct = fs.open_direct_write(self._temporary)
        except BaseException:
            self.abort()
            raise

    @property
    def room(self) -> int:
        """Rows that are still to be written."""
        return self.rows - self.written

    def space(self) -> np.ndarray:
        """Where the next rows may be laid down, uint32 [n, 4 + words] with n > 0 while there is ``room``: fill the
        first of them and call ``advance``."""
        return self._chunks.space()[:self.room]

    def advance(self, rows: int) -> None:
        """Take the first ``rows`` rows of ``space()``, whose checks are right, as written."""
        self._state = np.uint64(fold_checks(self._state, self._chunks.space()[:rows]))
        self._chunks.advance(rows)
        self.written += rows

    def append(self, rows: np.ndarray) -> None:
        """Write stored rows, uint32 [n, 4 + words], whose checks are right."""
        while len(rows):
            space = self.space()[:len(rows)]
            space[:] = rows[:len(space)]
            self.advance(len(space))
            rows = rows[len(space):]

    def shorten(self) -> None:
        """Take what is written so far, at least one row, as all there will be."""
        self.rows = self.written
        self._head, self._tail = self._describe(self.rows)
        self._chunks.restart(len(self._head))

    def _write(self, data: np.ndarray, offset: int) -> None:
        whole = len(data) // fs.DIRECT_BYTES * fs.DIRECT_BYTES if self._direct >= 0 else 0
        if whole:
            try:
                fs.write(self._direct, self._temporary, data[:whole], offset)
            except StorageError as error:
                if getattr(error.__cause__, "errno", None) != errno.EINVAL:
                    raise
                whole = 0  # a file system that wants larger blocks than most
        if whole < len(data):
            fs.write(self._descriptor, self._temporary, data[whole:], offset + whole)

    def finish(self) -> tuple[str, int]:
        """Put the file in place, durably; returns its digest and bytes."""
        if self.room:
            raise ValueError(f"{self.room} rows are missing from segment {self.path}")
        end = self._chunks.finish()
        fs.write(self._descriptor, self._temporary, self._head, 0)
        if self._tail:
            fs.write(self._descriptor, self._temporary, self._tail, end)
        if end + len(self._tail) < self._nbytes:
            fs.truncate(self._descriptor, self._temporary, end + len(self._tail))
        fs.sync(self._descriptor, self._temporary)
        self._close()
        fs.rename(self._temporary, self.path)
        fs.sync_directory(os.path.dirname(self.path))
        return _format_digest(self._state, self._head + self._tail), end + len(self._tail)

    def __enter__(self) -> "SegmentWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None or self._descriptor >= 0:
            self.abort()

    def _close(self) -> None:
        for descriptor in (self._direct, self._descriptor):
            if descriptor >= 0:
                fs.close(descriptor)
        self._direct = self._descriptor = -1

    def abort(self) -> None:
        """Remove what was written."""
        if self._chunks is not None:
            self._chunks.abort()
        self._close()
        fs.remove_quietly(self._temporary)
        fs.remove_quietly(self.path)


def _description(layout: RecordLayout, table: str, rows: int, deletions: bool) -> tuple[bytes, bytes]:
    """What h5py writes before and after the rows of a segment."""

    def describe(name: str, text: str) -> None:
        # Of fixed length, or HDF5 keeps the text in a heap without a checksum: a damaged one makes it loop forever.
        data = text.encode()
        file.attrs.create(name, data, dtype=h5py.string_dtype("utf-8", max(1, len(data))))

    capture = fs.Hdf5Capture()
    with capture.hdf5() as file:
        describe("format", FORMAT)
        file.attrs["version"] = np.uint32(LIFECYCLE_VERSION if layout.lifecycle else VERSION)
        describe("table", table)
        file.attrs["rows"] = np.uint64(rows)
        file.attrs["width"] = np.uint32(layout.width)
        file.attrs["state"] = np.uint32(layout.state)
        describe("dtype", layout.dtype.name)
        if layout.lifecycle:
            file.attrs["deletions"] = np.uint32(deletions)
        kind = h5py.h5t.py_create(layout.stored_dtype, logical=True)
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_layout(h5py.h5d.CONTIGUOUS)
        # the place of the rows is decided now, and nothing written there
        plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        dataset = h5py.h5d.create(file.id, DATASET.encode(), kind, h5py.h5s.create_simple((rows,)), plan)
        offset = dataset.get_offset()
        del dataset
    end = offset + rows * layout.stored_bytes
    length = capture.seek(0, os.SEEK_END)
    capture.seek(0)
    head = capture.read(offset)
    capture.seek(end)
    return head, capture.read(length - end)


class SegmentFile:
    """A segment, open for reading.

    ``layout``, ``rows``, ``table``, ``deletions`` (the rows are keys that were deleted), ``offset`` (in bytes, of row
    0) and ``nbytes`` describe it. ``direct`` is the descriptor for random reads: with ``direct=True`` one around the
    page cache, where the file system has that. Raises
    StorageError, which names the file, when it is no segment, damaged, or not of the layout asked for.
    """

    def __init__(self, path: str, layout: RecordLayout | None = None, direct: bool = False):
        self.path = os.path.abspath(path)
        self.nbytes = fs.size(self.path)
        self._read_header()
        if layout is not None and layout != self.layout:
            raise StorageError(f"{self.path} holds rows of {self.layout.describe()} (x + state), but the "
                               f"table has {layout.describe()}: dim, row optimizer or dtype differ from the "
                               "run that wrote it")
        self.end = self.offset + self.rows * self.layout.stored_bytes
        if self.end > self.nbytes:
            raise StorageError(f"{self.path} is shorter than its rows: it was truncated; start from the last "
                               "checkpoint")
        self.descriptor = fs.open_read(self.path)
        direct = fs.open_direct(self.path) if direct else -1
        self.direct = direct if direct >= 0 else self.descriptor

    def _read_header(self) -> None:
        try:
            with fs.open_hdf5(self.path) as file:
                kind, version = file.attrs.get("format"), int(file.attrs.get("version", 0))
                if not isinstance(kind, bytes) or kind.decode() != FORMAT:
                    raise StorageError(f"{self.path} is no segment of hpc_ctr")
                if version not in (VERSION, LIFECYCLE_VERSION):
                    raise StorageError(f"{self.path} has format version {version}, this program reads {VERSION} "
                                       f"and {LIFECYCLE_VERSION}: use the version of hpc_ctr that wrote it")
                self.table = file.attrs["table"].decode()
                self.layout = RecordLayout(int(file.attrs["width"]), int(file.attrs["state"]),
                                           np.dtype(file.attrs["dtype"].decode()), version == LIFECYCLE_VERSION)
                self.deletions = version == LIFECYCLE_VERSION and bool(file.attrs["deletions"])
                dataset = file[DATASET]
                self.rows, offset = int(file.attrs["rows"]), dataset.id.get_offset()
                right = dataset.shape == (self.rows,) and dataset.dtype == self.layout.stored_dtype
                if not right or offset is None:
                    raise ValueError("the dataset 'rows' is not what the attributes say")
                self.offset = int(offset)
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"{self.path} is damaged or no segment ({error}): start from the last "
                               "checkpoint") from error

    def damaged(self, row: int) -> StorageError:
        """The error for a row whose check is wrong."""
        return StorageError(f"{self.path}: row {row} is damaged (its checksum does not match): start from "
                            "the last checkpoint, and check the disk")

    def read(self, first: int, out: np.ndarray, verify: bool = True) -> None:
        """Read rows from number ``first`` on into ``out`` uint32 [n, 4 + words], C-contiguous."""
        one = np.zeros(1, np.int64)
        fs.read_many(np.array([self.descriptor]), [self.path], one,
                     one + self.offset + first * self.layout.stored_bytes, one + out.nbytes, one,
                     out.reshape(-1).view(np.uint8))
        if verify and (bad := first_bad_row(out)) >= 0:
            raise self.damaged(first + bad)

    def key_of(self, row: int) -> int:
        """The key of one row."""
        out = np.empty((1, 4 + self.layout.words), np.uint32)
        self.read(row, out)
        return int(out[0, 0]) | int(out[0, 1]) << 32

    def lower_bound(self, key: int) -> int:
        """Number of the first row whose key is ``key`` or above; ``rows`` when there is none."""
        low, high = 0, self.rows
        while low < high:
            middle = (low + high) // 2
            if self.key_of(middle) < key:
                low = middle + 1
            else:
                high = middle
        return low

    def digest_with(self, state: np.uint64) -> str:
        """The file's digest, given ``fold_checks`` over all of its rows."""
        head = fs.read(self.descriptor, self.path, 0, self.offset)
        tail = fs.read(self.descriptor, self.path, self.end, self.nbytes - self.end)
        return _format_digest(state, head + tail)

    def metadata_digest(self) -> str:
        """The half of the digest that covers everything but the rows."""
        return self.digest_with(new_digest())[16:]

    def close(self) -> None:
        """Close the file; more than once does no harm."""
        if self.descriptor >= 0:
            if self.direct != self.descriptor:
                fs.close(self.direct)
            fs.close(self.descriptor)
            self.descriptor = self.direct = -1

    def __enter__(self) -> "SegmentFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _format_digest(state: np.uint64, metadata: bytes) -> str:
    return f"{int(state):016x}{int(fold_bytes(new_digest(), np.frombuffer(metadata, np.uint8))):016x}"


class Cursor:
    """Reads a segment's rows [first, last) in order through one buffer, with checks and order verified."""

    def __init__(self, file: SegmentFile, buffer_bytes: int, first: int = 0, last: int | None = None):
        self.file, self.next, self.last = file, first, file.rows if last is None else last
        capacity = min(max(buffer_bytes // file.layout.stored_bytes, 16), max(self.last - first, 1))
        self._buffer = np.empty((capacity, 4 + file.layout.words), np.uint32)
        self._keys = np.empty(capacity, np.uint64)
        self._begin = self._end = 0
        self._previous = -1
        self.state = new_digest()
        self.refill()

    @property
    def rows(self) -> np.ndarray:
        """Buffered rows, uint32 [n, 4 + words]; a view that the next ``refill`` overwrites."""
        return self._buffer[self._begin:self._end]

    @property
    def keys(self) -> np.ndarray:
        """Keys of the buffered rows."""
        return self._keys[self._begin:self._end]

    @property
    def first_row(self) -> int:
        """Number in the file of the first buffered row."""
        return self.next - (self._end - self._begin)

    @property
    def ended(self) -> bool:
        """Whether the last row is in the buffer, or was."""
        return self.next == self.last

    def skip(self, rows: int) -> None:
        """Take so many rows out of the buffer."""
        self._begin += rows

    def refill(self) -> None:
        """Fill the buffer up, when at least half of it is free."""
        rest = self._end - self._begin
        if self.ended or rest > len(self._buffer) // 2:
            return
        self._buffer[:rest], self._keys[:rest] = self.rows.copy(), self.keys.copy()
        count = min(len(self._buffer) - rest, self.last - self.next)
        fresh, keys = self._buffer[rest:rest + count], self._keys[rest:rest + count]
        self.file.read(self.next, fresh)
        disorder = row_keys(fresh, keys)
        if disorder < 0 and int(keys[0]) <= self._previous:
            disorder = 0
        if disorder >= 0:
            raise StorageError(f"{self.file.path}: row {self.next + disorder} is out of order: the file is "
                               "damaged; start from the last checkpoint")
        self._previous = int(keys[-1])
        self.state = np.uint64(fold_checks(self.state, fresh))
        self._begin, self._end, self.next = 0, rest + count, self.next + count


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one segment: which cursor, number of the first row, keys and stored rows
    (views)."""

    cursor: int
    first_row: int
    keys: np.ndarray
    rows: np.ndarray


def merge(cursors: list[Cursor]) -> Iterator[list[Part]]:
    """Walk through several segments in key order: each step yields parts that cover one range of keys
    completely.

    The ranges ascend and do not overlap; a key that is in several segments appears in parts of the same step.
    Parts are views into the cursors' buffers, good until the next step.
    """
    while True:
        for cursor in cursors:
            cursor.refill()
        bounds = [int(c.keys[-1]) for c in cursors if not c.ended]
        bound = np.uint64(min(bounds, default=LAST_KEY))
        parts = []
        for i, cursor in enumerate(cursors):
            count = int(np.searchsorted(cursor.keys, bound, side="right"))
            if count:
                parts.append(Part(i, cursor.first_row, cursor.keys[:count], cursor.rows[:count]))
                cursor.skip(count)
        if not parts:
            return
        yield parts


def latest(parts: Sequence["Part | KeyPart"]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys of the parts, ascending, and for each the place of its last occurrence in their
    concatenation."""
    keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    last = np.ones(len(keys), bool)
    last[:-1] = keys[1:] != keys[:-1]
    return keys[last], order[last]


def unpack(rows: np.ndarray, layout: RecordLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys uint64 [n], records (as the layout says) and t uint32 [n] of stored rows."""
    keys, t = np.empty(len(rows), np.uint64), np.empty(len(rows), np.uint32)
    records = layout.empty(len(rows))
    unpack_rows(rows, keys, records.view(np.uint32), t)
    return keys, records, t


def iter_segment_rows(path: str, batch_rows: int = 65536, layout: RecordLayout | None = None
                      ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All rows of a segment in key order: (keys uint64 [n], records [n, floats], t uint32 [n]), n <=
    batch_rows.

    Raises StorageError naming file and row for damage, and when the layout is not ``layout``.
    """
    with SegmentFile(path, layout) as file:
        cursor = Cursor(file, batch_rows * file.layout.stored_bytes)
        while len(cursor.rows):
            yield unpack(cursor.rows[:batch_rows], file.layout)
            cursor.skip(min(batch_rows, len(cursor.rows)))
            cursor.refill()


def live_rows(paths: list[str], batch_rows: int = 65536, first_key: int = 0, last_key: int = LAST_KEY,
              layout: RecordLayout | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each key of several segments once, ascending, as (keys, records, t) of at most ``batch_rows`` rows.

    Where a key is in several segments, the latest in the order of ``paths`` wins; deleted keys are left out. Only
    keys from ``first_key`` to ``last_key`` (both included) are read. Memory: about two batches of rows, and at
    least 16 rows a segment.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SegmentFile(path, layout)) for path in paths]
        for file in files[1:]:
            if file.layout != files[0].layout:
                raise StorageError(f"{file.path} holds rows of {file.layout.describe()}, {files[0].path} of "
                                   f"{files[0].layout.describe()}: they are not of one table")
        cursors = []
        for file in files:
            first = file.lower_bound(first_key) if first_key > 0 else 0
            last = file.lower_bound(last_key + 1) if last_key < LAST_KEY else file.rows
            share = batch_rows * file.layout.stored_bytes // len(files)
            cursors.append(Cursor(file, share, first, max(first, last)))
        deletions = np.array([file.deletions for file in files])
        for parts in merge(cursors):
            _, places = latest(parts)
            if deletions.any():
                deleted = np.repeat(deletions[[part.cursor for part in parts]], [len(part.keys) for part in parts])
                places = places[~deleted[places]]
            rows = np.concatenate([part.rows for part in parts])
            for begin in range(0, len(places), batch_rows):
                yield unpack(rows[places[begin:begin + batch_rows]], files[0].layout)
