"""The data on real ranks: what every rank reads, and errors that all ranks raise together."""

from pathlib import Path

import numpy as np
import pytest
from data_common import options, read_all, row_numbers, same_batches, write_rows
from mpi4py import MPI

from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.source import Source, open_source
from hpc_ctr.errors import UsageError

COMM = MPI.COMM_WORLD
ROWS = 150


def shared(tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return Path(COMM.bcast(str(tmp_path)))


@pytest.mark.parallel(nprocs=[2, 3])
def test_every_row_is_read_once_and_resumed(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    if COMM.rank == 0:
        write_rows(folder / "a.tsv", 0, ROWS)
    COMM.barrier()
    source = open_source(options(folder / "a.tsv"), 1, COMM)
    with source.stream() as stream:
        head = [next(stream) for _ in range(1 + COMM.rank)]
        state = source.merge_positions(COMM.allgather(stream.position()))
        tail = list(stream)
    rows = sorted(row for mine in COMM.allgather(row_numbers(head + tail)) for batch in mine for row in batch)
    again = same_batches(read_all(source, state), tail)
    total = source.merge_bad_rows(COMM.allgather(source.bad_rows)).total
    states = COMM.allgather(state)
    assert all(COMM.allgather(rows == list(range(ROWS)) and again and 0 < total <= ROWS))
    assert all(s == state for s in states)
    # on one rank, what is left is read once
    left = [row for batch in row_numbers(read_all(Source(options(folder / "a.tsv"), 1, "train", 0, 1), state))
            for row in batch]
    taken = [row for mine in COMM.allgather(row_numbers(head)) for batch in mine for row in batch]
    assert all(COMM.allgather(sorted(left + taken) == list(range(ROWS))))


@pytest.mark.parallel(nprocs=2)
def test_split_by_time_over_ranks(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    times = np.random.default_rng(2).integers(0, 40, 203)
    if COMM.rank == 0:
        (folder / "t.inter").write_text("row:token\tlabel:float\tt:float\n" + "".join(
            f"{i}\t1\t{t}\n" for i, t in enumerate(times)))
    COMM.barrier()
    opts = DataOptions.from_dict({
        "format": "recbole", "files": [str(folder / "t.inter")], "split": {"by": "time", "test": 0.2},
        "schema": {"categorical": ["row"], "dense": ["t"], "time": "t"}, "batch_size": 7, "block_bytes": 60})
    limit = np.sort(times)[203 - 41 - 1]
    for part, wanted in (("train", times[times <= limit]), ("test", times[times > limit])):
        mine = [t for batch in read_all(open_source(opts, 1, COMM, part)) for t in batch.dense[:, 0].tolist()]
        found = sorted(t for ts in COMM.allgather(mine) for t in ts)
        assert all(COMM.allgather(found == sorted(wanted.tolist()) and len(mine) > 0))


@pytest.mark.parallel(nprocs=2)
def test_stripes_are_the_batches_of_one_rank(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    if COMM.rank == 0:
        write_rows(folder / "a.tsv", 0, ROWS)
    COMM.barrier()
    mine = row_numbers(read_all(open_source(options(folder / "a.tsv", deal="batch", batch_size=5), 1, COMM)))
    whole = row_numbers(read_all(open_source(options(folder / "a.tsv", batch_size=10), 1, None)))
    both = [a + b for a, b in zip(*COMM.allgather(mine), strict=True)]
    assert all(COMM.allgather(both == whole))


@pytest.mark.parallel(nprocs=2)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    if COMM.rank == 0:
        write_rows(folder / "a.tsv", 0, 20)
    COMM.barrier()
    name = "a.tsv" if COMM.rank == 0 else "gone.tsv"
    with pytest.raises(UsageError, match=r"data.files: there is no file .*gone.tsv"):
        open_source(options(folder / name), 1, COMM)
