"""How long opening a cold store takes: reading every segment once, checking its rows, building the index."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hpc_ctr.bench import page_cache
from hpc_ctr.bench.common import Results
from hpc_ctr.errors import UsageError
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.recovery import verify
from hpc_ctr.train.progress import Bar

LAYOUT = RecordLayout(16, 32)   # dim 16 with Adam: 192 bytes and 16 before them
_STALE = 10                     # every segment supersedes the 10th part of the one before
_READ_BYTES = 1 << 20


def opening(results: Results, folder: str, segments: int, rows: int, runs: int) -> None:
    """Seconds to open a store of so many rows in so many segments, from disk and from the page cache.

    ``read_only`` is the time that reading the same files from front to back takes with as many threads: what the disk
    allows. The files are written below ``folder`` ("" = the system's directory for temporary files) and removed.
    """
    if not 1 <= segments <= rows:
        raise UsageError(f"--segments {segments} --rows {rows}: give at least one segment, and one row for each")
    with tempfile.TemporaryDirectory(prefix="hpc_ctr-bench-", dir=folder or None) as scratch:
        options = ColdStoreOptions(max_segments=segments, stale_share=1.0)
        files = _fill(scratch, options, segments, rows)
        nbytes = sum(map(os.path.getsize, files))
        print(f"{segments} segments, {nbytes / 1e9:.2f} GB, in {scratch}")
        taken: dict[tuple[str, str], list[float]] = {}
        for _ in range(runs):  # alternating, so that a slower spell of the disk meets all
            for case, cached in (("open_from_disk", False), ("open_from_cache", True)):
                for system, action in (("hpc_ctr", lambda: _open(scratch, options)), ("read_only", lambda: _read(files)),
                                       ("verify", lambda: _verify(scratch))):
                    if not cached:
                        page_cache.drop(files)
                    begin = time.perf_counter()
                    action()
                    taken.setdefault((case, system), []).append(time.perf_counter() - begin)
    for (case, system), seconds in taken.items():
        results.add(case, system, "s", seconds)


def _fill(folder: str, options: ColdStoreOptions, segments: int, rows: int) -> list[str]:
    rng = np.random.default_rng(1)
    before = np.empty(0, np.uint64)
    with ColdStore(folder, LAYOUT, "bench", options) as store:
        for bounds in np.array_split(np.arange(rows), segments):
            again = before[:len(bounds) // _STALE]
            fresh = np.unique(rng.integers(0, 2**64, len(bounds) - len(again), dtype=np.uint64))
            keys = np.unique(np.concatenate([again, fresh]))
            store.put(keys, rng.random((len(keys), LAYOUT.floats), np.float32), np.ones(len(keys), np.uint32))
            before = rng.permutation(fresh)
        return [segment.path for segment in store.segments()]


def _open(folder: str, options: ColdStoreOptions) -> None:
    with Bar("opening") as bar:
        ColdStore(folder, LAYOUT, "bench", options, bar.update).close()


def _verify(folder: str) -> None:
    if problems := verify(folder):
        raise UsageError(problems[0])


def _read(files: list[str]) -> None:
    with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_read_file, files))


def _read_file(path: str) -> None:
    buffer = bytearray(_READ_BYTES)
    with Path(path).open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
