"""Reading whole segments from front to back: several at once, so that the disk and all CPUs have something to do.

Opening a store, taking over a checkpoint's segments and ``verify`` read everything. They want keys and digests but no
rows, so a thread reads through a buffer that fits into its CPU's cache, and all that stays in memory is keys.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.kernels.checksum import new_digest
from hpc_ctr.kernels.scan import scan_rows
from hpc_ctr.storage.segment import LAST_KEY, SegmentFile

Progress = Callable[[int, int], None]   # called with bytes done and bytes in all, by the thread that started the work

_BLOCK_BYTES = 512 << 10        # of a read
_KEYS = 1 << 20                 # in memory at once, over all segments of a walk
_FEWEST_KEYS = 512              # of one segment
_WORTH_THREADS = 16 << 20       # bytes below which starting threads takes longer than it saves


class Inline:
    """Stands in for a ThreadPoolExecutor where there is little to do: a call is made when its result is asked for."""

    def submit(self, function: Callable, *arguments) -> "Inline":
        """Keep the call."""
        call = Inline()
        call.result = lambda: function(*arguments)
        return call


@contextmanager
def readers(nbytes: int) -> Iterator[ThreadPoolExecutor | Inline]:
    """Threads for reading so many bytes; they are gone when the block is left."""
    if nbytes < _WORTH_THREADS:
        yield Inline()
        return
    # two a CPU: while one waits for the disk the other checks rows
    pool = ThreadPoolExecutor(min(16, 2 * len(os.sched_getaffinity(0))), thread_name_prefix="hpc_ctr-scan")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class KeyCursor:
    """Goes through a segment once, checking each row and the order of the keys, and holds the next of its keys.

    ``keys``: uint64, those that are read and not taken yet; ``first_row``: the number in the file of the first of them;
    ``ended``: whether the last key is among them or was. Raises StorageError naming file and row for damage.
    """

    def __init__(self, file: SegmentFile, capacity: int):
        self.file = file
        self.keys = np.empty(0, np.uint64)
        self.first_row = self._next = 0
        self._capacity = max(1, min(capacity, file.rows))
        self._state = new_digest()
        self._previous = np.uint64(0)

    @property
    def ended(self) -> bool:
        """Whether everything is read."""
        return self._next == self.file.rows

    def take(self, last_key: np.uint64) -> np.ndarray:
        """Take the keys up to ``last_key``."""
        count = int(np.searchsorted(self.keys, last_key, side="right"))
        taken, self.keys = self.keys[:count], self.keys[count:]
        self.first_row += count
        return taken

    def refill(self) -> int:
        """Read on when at least half of the room for keys is free; returns the bytes read. Any thread may call it."""
        rest = len(self.keys)
        if self.ended or rest > self._capacity // 2:
            return 0
        count = min(self._capacity - rest, self.file.rows - self._next)
        keys = np.empty(rest + count, np.uint64)    # a new one, for those that were taken are views of the old
        keys[:rest] = self.keys
        self._read(keys[rest:])
        self.keys = keys
        return count * self.file.layout.stored_bytes

    def read_all(self) -> str:
        """Read what is left without keeping any key; returns the file's digest."""
        keys = np.empty(self._block_rows, np.uint64)
        while not self.ended:
            self._read(keys[:self.file.rows - self._next])
        return self.digest()

    def digest(self) -> str:
        """The file's digest, when everything is read."""
        return self.file.digest_with(self._state)

    @property
    def _block_rows(self) -> int:
        return max(1, _BLOCK_BYTES // self.file.layout.stored_bytes)

    def _read(self, keys: np.ndarray) -> None:
        """Read as many rows as there is room in ``keys``, which is filled."""
        file = self.file
        buffer = np.empty((min(self._block_rows, len(keys)), 4 + file.layout.words), np.uint32)
        for begin in range(0, len(keys), len(buffer)):
            part = keys[begin:begin + len(buffer)]
            rows = buffer[:len(part)]
            file.read(self._next, rows, verify=False)
            bad, disorder, state = scan_rows(rows, part, self._next == 0, self._previous, self._state)
            if bad >= 0:
                raise file.damaged(self._next + bad)
            if disorder >= 0:
                raise StorageError(f"{file.path}: row {self._next + disorder} is out of order: the file is damaged; "
                                   "start from the last checkpoint")
            self._state, self._previous = np.uint64(state), part[-1]
            self._next += len(part)


@dataclass(frozen=True)
class KeyPart:
    """Keys of consecutive rows of one segment: which cursor, number of the first row, keys uint64 ascending."""

    cursor: int
    first_row: int
    keys: np.ndarray


def key_cursors(files: Sequence[SegmentFile]) -> list[KeyCursor]:
    """Cursors for ``walk``: the larger a file, the more of its keys are held, so that all advance alike."""
    rows = max(1, sum(file.rows for file in files))
    return [KeyCursor(file, max(_FEWEST_KEYS, _KEYS * file.rows // rows)) for file in files]


def walk(cursors: Sequence[KeyCursor], progress: Progress | None = None) -> Iterator[list[KeyPart]]:
    """Walk through segments in key order: each step yields parts that cover one range of keys completely.

    The ranges ascend and do not overlap; a key that is in several segments appears in parts of the same step. While the
    caller works on a step the next one is being read. Close the generator before the files.
    """
    total = sum(cursor.file.rows * cursor.file.layout.stored_bytes for cursor in cursors)
    done = 0
    with readers(total) as pool:
        under_way = [pool.submit(cursor.refill) for cursor in cursors]
        while True:
            for reading in under_way:
                nbytes = reading.result()
                done += nbytes
                if nbytes and progress is not None:
                    progress(done, total)
            bound = min((cursor.keys[-1] for cursor in cursors if not cursor.ended), default=np.uint64(LAST_KEY))
            parts = []
            for i, cursor in enumerate(cursors):
                first = cursor.first_row
                if len(keys := cursor.take(bound)):
                    parts.append(KeyPart(i, first, keys))
            if not parts:
                return
            under_way = [pool.submit(cursor.refill) for cursor in cursors]
            yield parts


def read_whole(files: Sequence[SegmentFile], progress: Progress | None = None) -> list[str | StorageError]:
    """Read files completely, several at once; returns for each its digest, or what is damaged."""
    total = sum(file.rows * file.layout.stored_bytes for file in files)
    found: list[str | StorageError] = []
    done = 0
    with readers(total) as pool:
        under_way = [pool.submit(KeyCursor(file, 1).read_all) for file in files]
        for file, reading in zip(files, under_way, strict=True):
            try:
                found.append(reading.result())
            except StorageError as error:
                found.append(error)
            done += file.rows * file.layout.stored_bytes
            if progress is not None:
                progress(done, total)
    return found
