"""For the tests of the data: files written by hand, rows told apart by an id, and ranks played by threads."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr.data.batch import Batch
from hpc_ctr.data.keys import id_keys
from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.source import Source

ONE = {"label": "label", "dense": ["x"], "categorical": ["row"]}     # a Criteo file of three columns


def write_rows(path: Path, first: int, n: int) -> Path:
    """Rows first .. first + n - 1 of three columns: label, a number, the row's number in hex."""
    path.write_text("".join(f"{row % 2}\t{row}\t{row:x}\n" for row in range(first, first + n)))
    return path


def options(*files: Path, **more: Any) -> DataOptions:
    """Options for files of ``write_rows``: small batches and blocks."""
    entry = {"files": [str(f) for f in files], "schema": ONE, "batch_size": 7, "block_bytes": 100, "shuffle_blocks": 3,
             **more}
    return DataOptions.from_dict(entry)


_ROW_OF_KEY = {int(k): row for row, k in enumerate(id_keys("row", np.arange(20_000)))}


def row_numbers(batches: list[Batch]) -> list[list[int]]:
    """The rows of ``write_rows`` that each batch holds."""
    return [[_ROW_OF_KEY[int(k)] for k in batch.keys] for batch in batches]


def read_all(source: Source, state: Any = None) -> list[Batch]:
    """All batches of a stream."""
    with source.stream(state) as stream:
        return list(stream)


def same_batches(ones: list[Batch], others: list[Batch]) -> bool:
    """Whether two lists of batches are the same bits."""
    return len(ones) == len(others) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for a, b in zip(ones, others, strict=True) for name in ("label", "dense", "keys", "offsets"))


class ThreadComm:
    """What the data needs of a communicator, between threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list):
        self.rank, self.size = rank, size
        self._barrier, self._slots = barrier, slots

    def allgather(self, value: Any) -> list:
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def allreduce(self, value: Any) -> Any:
        return sum(self.allgather(value)[1:], start=self._slots[0]) if self.size == 1 else sum(self.allgather(value))


def on_ranks(size: int, call: Callable[[ThreadComm], Any]) -> list:
    """Results of ``call(comm)`` on ``size`` ranks; raises the first rank's error."""
    barrier, slots = threading.Barrier(size, timeout=60), [None] * size
    results: list = [None] * size
    errors: list = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = call(ThreadComm(rank, size, barrier, slots))
        except Exception as error:
            errors[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results
