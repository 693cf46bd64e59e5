"""The reading thread: bounded, its errors come out, it ends."""

import gc
import threading
import time
from pathlib import Path

import pytest
from data_common import options, write_rows

from hpc_ctr.data.prefetch import Prefetcher
from hpc_ctr.data.source import PREFETCH, Source


def readers() -> int:
    return sum(t.name in ("hpc_ctr-reader", "test-reader") and t.is_alive() for t in threading.enumerate())


def wait_for(condition) -> bool:
    limit = time.monotonic() + 30
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    return condition()


def test_runs_ahead_only_so_far() -> None:
    made = []

    def numbers(stop):
        for i in range(1000):
            made.append(i)
            yield i

    ahead = Prefetcher(numbers, 3, "test-reader")
    assert wait_for(lambda: len(made) == 4)            # three in the queue and one in hand
    assert next(ahead) == 0
    assert wait_for(lambda: len(made) == 5)
    ahead.close()
    ahead.close()
    assert len(made) <= 6 and list(ahead) == [] and readers() == 0


def test_errors_come_out_after_what_was_made() -> None:
    def broken(stop):
        yield 1
        raise KeyError("gone")

    ahead = Prefetcher(broken, 3, "test-reader")
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="gone"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    assert readers() == 0


def test_streams_end_their_thread(tmp_path: Path) -> None:
    source = Source(options(write_rows(tmp_path / "a.tsv", 0, 3000)), 1, "train", 0, 1)
    stream = source.stream()
    next(stream)
    assert readers() == 1
    stream.close()
    assert readers() == 0
    with source.stream() as stream:
        assert len([next(stream) for _ in range(PREFETCH + 3)]) == PREFETCH + 3
    assert readers() == 0
    stream = source.stream()
    next(stream)
    del stream
    gc.collect()
    assert wait_for(lambda: readers() == 0)
    assert sum(b.size for b in source.stream()) == 3000
    assert readers() == 0


def test_an_error_in_the_generator_of_a_half_read_stream(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 3000)
    source = Source(options(path, shuffle_blocks=1), 1, "train", 0, 1)
    path.unlink()
    with source.stream() as stream, pytest.raises(Exception, match=r"a.tsv cannot be read: No such file"):
        next(stream)
