"""Train and test: exact by time, stable by hash, by files; on any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from data_common import ThreadComm, on_ranks, options, read_all, row_numbers, write_rows

from hpc_ctr.data import split
from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.source import open_source
from hpc_ctr.data.split import bits_time, time_bits, time_threshold
from hpc_ctr.errors import DataError, UsageError


def expected(times: np.ndarray, share: float) -> float:
    """The time of the last training row, by sorting."""
    train = len(times) - round(len(times) * share)
    return float(np.sort(times)[train - 1]) if train else float("-inf")


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["seconds", "ties", "wild", "few", "same"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("cache", [0, 200, 1 << 22])
def test_threshold_is_that_of_sorting(monkeypatch, share: float, kind: str, size: int, cache: int) -> None:
    monkeypatch.setattr(split, "_CACHE_ROWS", cache)
    rng = np.random.default_rng(5)
    times = {"seconds": np.floor(rng.uniform(8.8e8, 8.9e8, 1000)), "ties": rng.integers(-3, 4, 1000) * 1.0,
             "wild": rng.standard_normal(1000) * 10.0 ** rng.integers(-300, 300, 1000),
             "few": np.array([3.0, -0.0, 0.0]),
             "same": np.full(77, 12.5)}[kind]

    def on_rank(comm: ThreadComm) -> tuple[float, int]:
        mine = times[comm.rank::size]
        return time_threshold(lambda: iter(np.array_split(mine, 7)), share, comm if size > 1 else None)

    assert set(on_ranks(size, on_rank)) == {(expected(times, share), len(times))}


def test_times_as_bits() -> None:
    times = np.array([-np.inf, -1e300, -2.5, -1e-310, 0.0, 5e-324, 1.0, 881250949.0, 1e308, np.inf])
    bits = time_bits(times)
    assert np.all(np.diff(bits.astype(object)) > 0)
    assert [bits_time(int(b)) for b in bits] == times.tolist()
    assert time_bits(np.array([-0.0]))[0] == time_bits(np.array([0.0]))[0]


def by_time(tmp_path: Path, times: list, **more) -> DataOptions:
    path = tmp_path / "t.inter"
    path.write_text("row:token\tlabel:float\tt:float\n" + "".join(f"{i}\t1\t{t}\n" for i, t in enumerate(times)))
    schema = {"categorical": ["row"], "dense": ["t"], "time": "t"}
    return DataOptions.from_dict({"format": "recbole", "files": [str(path)], "schema": schema, "batch_size": 7,
                                  "split": {"by": "time", "test": 0.2}, "block_bytes": 60, **more})


@pytest.mark.parametrize("size", [1, 2, 5])
def test_split_by_time_is_exact(tmp_path: Path, size: int) -> None:
    times = np.random.default_rng(1).integers(0, 60, 203)
    limit = expected(times, 0.2)
    opts = by_time(tmp_path, times.tolist())

    def on_rank(comm: ThreadComm) -> list:
        parts = []
        for part in ("train", "test"):
            parts.append([t for b in read_all(open_source(opts, 1, comm, part)) for t in b.dense[:, 0].tolist()])
        return parts

    ranks = on_ranks(size, on_rank)
    assert sorted(t for train, _ in ranks for t in train) == sorted(times[times <= limit].tolist())
    assert sorted(t for _, test in ranks for t in test) == sorted(times[times > limit].tolist())
    assert (times > limit).sum() <= round(0.2 * 203) < (times >= limit).sum()


def test_rows_without_time_are_bad_and_belong_to_no_part(tmp_path: Path) -> None:
    opts = by_time(tmp_path, [1, 2, "", 3, 4, "x", 5], max_bad_share=0.5)
    train, test = open_source(opts, 1), open_source(opts, 1, part="test")
    assert sum(b.size for b in read_all(train)) == 4 and sum(b.size for b in read_all(test)) == 1
    assert train.bad_rows.count == 2 and train.bad_rows.total == 7


def test_an_error_while_looking_for_the_threshold_is_raised_on_all_ranks(tmp_path: Path, monkeypatch) -> None:
    opts = by_time(tmp_path, list(range(50)))
    from hpc_ctr.data.source import Source
    whole = Source._times

    def broken(self):
        if self.rank == 1:
            raise DataError("disk gone")
        return whole(self)

    monkeypatch.setattr(Source, "_times", broken)
    caught = []

    def on_rank(comm: ThreadComm) -> None:
        with pytest.raises(DataError, match="disk gone") as error:
            open_source(opts, 1, comm)
        caught.append(error)

    on_ranks(3, on_rank)
    assert len(caught) == 3


def test_split_by_hash(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 10_000)
    again = tmp_path / "b.tsv"
    again.write_text("".join(reversed(path.read_text().splitlines(keepends=True))).replace("\n", "\r\n"))

    def rows(file: Path, part: str, seed: int = 1, **more) -> set[int]:
        opts = options(file, split={"by": "hash", "test": 0.2}, block_bytes=5000, batch_size=500, **more)
        batches = read_all(open_source(opts, seed, None, part))
        return {row for batch in row_numbers(batches) for row in batch}

    train, test = rows(path, "train"), rows(path, "test")
    assert train | test == set(range(10_000)) and not train & test
    assert abs(len(test) - 2000) < 5 * 40
    assert rows(again, "test") == test                    # by the text of the row, wherever it stands
    other = rows(path, "test", seed=2)
    assert other != test and abs(len(other & test) - 400) < 120


def test_split_by_files(tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "a.tsv", 0, 20), write_rows(tmp_path / "b.tsv", 20, 5)
    opts = options(one, test_files=[str(two)], split={"by": "files"})
    assert sum(b.size for b in read_all(open_source(opts, 1))) == 20
    assert sum(b.size for b in read_all(open_source(opts, 1, None, "test"))) == 5
    opts.test_files = [str(tmp_path / "c.tsv")]
    with pytest.raises(UsageError, match=r"data.test_files: there is no file"):
        open_source(opts, 1, None, "test")


def test_ranks_that_see_other_files_are_told_so(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{i}.tsv", 0, 20 + i) for i in range(2)]

    def on_rank(comm: ThreadComm) -> None:
        with pytest.raises(UsageError, match="rank 1 finds other files"):
            open_source(options(paths[comm.rank]), 1, comm)

    on_ranks(2, on_rank)


def test_one_ranks_usage_error_is_raised_on_all(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 20)

    def on_rank(comm: ThreadComm) -> None:
        with pytest.raises(UsageError, match=r"data.files: there is no file"):
            open_source(options(path if comm.rank else tmp_path / "gone.tsv"), 1, comm)

    on_ranks(2, on_rank)
