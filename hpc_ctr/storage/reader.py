"""Rows read from segments: many at once, by threads that keep the disk's queue full, around the page cache.

A random read of one row costs a whole page, and a disk gives its speed only when many reads wait for it. So the rows
wanted are sorted by place, neighbours are fetched by one read through the gap between them, and a pool of threads works
off the reads inside numba, without Python's lock. Each thread checks and copies the rows of a read while the others'
reads are under way.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import carray, njit

from hpc_ctr.kernels.memory import pointer
from hpc_ctr.kernels.rows import plan_reads, take_rows
from hpc_ctr.storage import fs
from hpc_ctr.storage.segment import SegmentFile

_PAGE = np.uint64(fs.DIRECT_BYTES)
_RUNS_PER_TASK = 4      # below so many reads a thread is not worth waking
_TASKS_PER_THREAD = 4   # reads differ in length: threads that are done early take another share


@dataclass(frozen=True)
class SegmentMap:
    """Arrays over open segments, ascending by location, for the read kernels.

    bases int64 [S]: location of the first row; offsets int64 [S]: its byte in the file; descriptors int64 [S].
    """

    bases: np.ndarray
    offsets: np.ndarray
    descriptors: np.ndarray
    paths: list[str]

    @classmethod
    def of(cls, files: Iterable[tuple[int, SegmentFile]]) -> "SegmentMap":
        """files: (location of the first row, file), ascending."""
        files = list(files)
        return cls(np.array([base for base, _ in files], np.int64),
                   np.array([file.offset for _, file in files], np.int64),
                   np.array([file.direct for _, file in files], np.int64), [file.path for _, file in files])


@dataclass(frozen=True)
class Wanted:
    """What a read serves. locations int64 [n], ascending; location i is meant for key ``keys[places[i]]``; where the
    stored key is that one, ``found[places[i]]`` is set and, unless ``targets`` is empty, record and t go to row
    ``targets[places[i]]`` of ``words`` uint32 [*, W] and ``t`` uint32.
    """

    locations: np.ndarray
    places: np.ndarray
    keys: np.ndarray
    targets: np.ndarray
    words: np.ndarray
    t: np.ndarray
    found: np.ndarray


def read_rows(where: SegmentMap, wanted: Wanted, row_bytes: int, gap_bytes: int, read_bytes: int,
              threads: int) -> tuple[int, int, int]:
    """Serve ``wanted``. Returns (position in ``locations`` of a row that fails its check or -1, reads, bytes read).

    gap_bytes: rows that lie so near to each other are fetched by one read; read_bytes: the longest read; threads: reads
    under way at once. Raises StorageError naming the file when a read fails.
    """
    n = len(wanted.locations)
    if n == 0:
        return -1, 0, 0
    segment, offset, length = (np.empty(n, np.int64) for _ in range(3))
    first = np.empty(n + 1, np.int64)
    read_bytes = max(read_bytes, row_bytes)
    runs = plan_reads(wanted.locations, where.bases, where.offsets, row_bytes, gap_bytes, read_bytes, segment, offset,
                      length, first)
    tasks = max(1, min(threads * _TASKS_PER_THREAD, runs // _RUNS_PER_TASK))
    bounds = np.linspace(0, runs, tasks + 1).astype(np.int64)
    # a read begins and ends at whole pages, up to a page further out on either side, and so does the buffer
    stage = int(length[:runs].max()) + 3 * fs.DIRECT_BYTES
    failures = np.full((tasks, 3), -1, np.int64)

    def serve(task: int) -> None:
        buffer = np.empty(stage, np.uint8)
        _serve(where.descriptors, where.bases, where.offsets, segment, offset, length, first, bounds[task],
               bounds[task + 1], buffer, row_bytes // 4, wanted.locations, wanted.places, wanted.keys, wanted.targets,
               wanted.words, wanted.t, wanted.found, failures[task])

    with fs.reading(where.paths[int(segment[0])]):
        if tasks == 1 or threads == 1:
            for task in range(tasks):
                serve(task)
        else:
            done = [_pool(threads, os.getpid()).submit(serve, task) for task in range(tasks)]
            wait(done)
            for future in done:
                future.result()
    for failed, code, _ in failures:
        if failed >= 0:
            raise fs.read_failed(where.paths[int(segment[failed])], int(code))
    bad = failures[failures[:, 2] >= 0, 2]
    return int(bad[0]) if len(bad) else -1, runs, int(length[:runs].sum())


@njit(nogil=True, cache=True)
def _serve(descriptors, bases, offsets, segment, offset, length, first, begin, end, buffer, words, locations, places,
           keys, targets, records, t, found, failure):
    """Read runs ``begin`` to ``end - 1`` one after the other and serve the rows of each.

    ``failure`` int64 [3] becomes (run, error number, -1) or (-1, -1, location) when a read or a row's check fails.
    """
    base = np.uint64(buffer.ctypes.data)
    base += (_PAGE - base % _PAGE) % _PAGE  # reads around the page cache go from whole pages to whole pages
    start = np.zeros(1, np.int64)
    for run in range(begin, end):
        shift = offset[run] % np.int64(_PAGE)
        whole = -(-(shift + length[run]) // np.int64(_PAGE)) * np.int64(_PAGE)
        code = fs.read_range(descriptors[segment[run]], offset[run] - shift, shift + length[run], whole, base)
        if code != 0:
            failure[0], failure[1] = run, code
            return
        rows = carray(pointer(base + np.uint64(shift)), length[run] // 4, np.uint32)
        failure[2] = take_rows(rows, words, start, run, run + 1, segment, offset, first, bases, offsets, locations,
                               places, keys, targets, records, t, len(targets) > 0, found)
        if failure[2] >= 0:
            return


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child has none of its parent's and makes its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="hpc_ctr-read")
