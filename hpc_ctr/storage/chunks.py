"""Rows on their way to a file: chunks of memory for writes around the page cache, one filled while one is written."""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hpc_ctr.kernels.memory import LazyArray
from hpc_ctr.storage.fs import DIRECT_BYTES

_CHUNK_BYTES = 2 << 20


class ChunkWriter:
    """Hands out memory for rows and writes it in order through ``write(data uint8 [n], offset in bytes)``.

    Rows of ``row_bytes`` bytes follow each other in the file from byte ``offset`` on, ``rows`` of them at most. When they
    are more than one chunk, chunks are written by a thread of its own, so that the caller fills the next one meanwhile;
    then every chunk but the last is a multiple of DIRECT_BYTES long and so aligned in memory. An error of ``write`` is
    raised by a later call.
    """

    def __init__(self, write: Callable[[np.ndarray, int], None], offset: int, row_bytes: int, rows: int):
        self._write, self._first, self._offset = write, offset, offset
        unit = math.lcm(row_bytes, DIRECT_BYTES) // row_bytes
        self._capacity = unit * max(1, _CHUNK_BYTES // (unit * row_bytes))
        self.several = rows > self._capacity
        count, size = (2, self._capacity) if self.several else (1, max(rows, 1))
        self._chunks = LazyArray((count, size, row_bytes // 4), np.uint32).array  # which begins at a page
        self._filled = self._turn = 0
        self._thread = ThreadPoolExecutor(1, "segment") if self.several else None
        self._under_way: Future | None = None

    def space(self) -> np.ndarray:
        """Free rows of the present chunk, uint32 [n > 0, words]."""
        return self._chunks[self._turn, self._filled:]

    def advance(self, rows: int) -> None:
        """The first ``rows`` rows of ``space()`` are filled."""
        self._filled += rows
        if self._filled == self._chunks.shape[1] and self._thread is not None:
            self._send()

    def restart(self, offset: int) -> None:
        """Rows begin at ``offset`` after all: only as long as nothing was written, or at the offset that it was."""
        if self._offset != self._first and offset != self._first:
            raise ValueError(f"rows were written from byte {self._first} on, they cannot begin at {offset}")
        self._offset += offset - self._first
        self._first = offset

    def _send(self) -> None:
        data = self._chunks[self._turn, :self._filled].reshape(-1).view(np.uint8)
        self._wait()
        if self._thread is not None:
            self._under_way = self._thread.submit(self._write, data, self._offset)
            self._turn = 1 - self._turn
        else:
            self._write(data, self._offset)
        self._offset += len(data)
        self._filled = 0

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def finish(self) -> int:
        """Write what is left and wait for all of it; returns the offset behind the last row."""
        if self._filled:
            self._send()
        self._wait()
        self.abort()
        return self._offset

    def abort(self) -> None:
        """Wait for the write under way, whatever becomes of it, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._under_way = None
