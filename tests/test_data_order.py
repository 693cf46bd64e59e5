"""The order of the data: each row once for any number of ranks, and a cursor that loses and repeats nothing."""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from data_common import options, read_all, row_numbers, same_batches, write_rows

from hpc_ctr.data.batch import Batch
from hpc_ctr.data.order import OrderState, Unit, deal, remaining, windows
from hpc_ctr.data.source import Source
from hpc_ctr.errors import UsageError

ROWS = 260                                          # some 30 blocks of 100 bytes, in two files


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [write_rows(tmp_path / "a.tsv", 0, 97), write_rows(tmp_path / "b.tsv", 97, ROWS - 97)]


def ranks_of(files: list[Path], size: int, seed: int = 3, part: str = "train", **more) -> list[Source]:
    return [Source(options(*files, **more), seed, part, rank, size) for rank in range(size)]


def flat(batches: list[Batch]) -> list[int]:
    return [row for batch in row_numbers(batches) for row in batch]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 50])
def test_every_row_is_read_once(files: list[Path], size: int, shuffle: bool) -> None:
    sources = ranks_of(files, size, shuffle=shuffle)
    batches = [read_all(source) for source in sources]
    assert sorted(row for mine in batches for row in flat(mine)) == list(range(ROWS))
    for mine in batches:
        assert all(b.size == 7 for b in mine[:-1]) and all(0 < b.size <= 7 for b in mine[-1:])
    if size == 50:
        assert sum(not mine for mine in batches) == 50 - sources[0].num_blocks > 0       # ranks without a block
    merged = sources[0].merge_bad_rows([s.bad_rows for s in sources])
    assert (merged.count, merged.total) == (0, ROWS)


def test_block_bytes_and_line_ends_lose_nothing(tmp_path: Path) -> None:
    for end in ("\n", ""):
        path = write_rows(tmp_path / "a.tsv", 0, 50)
        path.write_text(path.read_text().rstrip("\n") + end)
        for size in (1, 2, 3, 5, 7, 8, 9, 64, 10_000):
            (source,) = ranks_of([path], 1, shuffle=False, block_bytes=size)
            assert flat(read_all(source)) == list(range(50))


def test_epochs_and_seeds_have_their_own_order(files: list[Path]) -> None:
    (source,) = ranks_of(files, 1)
    first, again, second = (flat(read_all(source, source.start(e))) for e in (0, 0, 1))
    (other,) = ranks_of(files, 1, seed=4)
    assert first == again != second and first != flat(read_all(other))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert flat(read_all(ranks_of(files, 1, shuffle=False)[0])) == list(range(ROWS))
    # rows of a window's blocks are mixed with each other
    steps = np.abs(np.diff(first))
    assert (steps == 1).mean() < 0.2


def test_test_rows_keep_their_order(files: list[Path]) -> None:
    sources = ranks_of(files, 1, part="test", split={"by": "files"}, test_files=[str(files[1])], deal="batch")
    assert flat(read_all(sources[0])) == list(range(97, ROWS))
    assert read_all(ranks_of(files, 1, part="test")[0]) == []        # no split, no test rows


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [7, 40])
def test_resuming_at_every_cut_gives_the_same_bits(files: list[Path], shuffle: bool, batch_size: int) -> None:
    size = 2
    whole = [read_all(s) for s in ranks_of(files, size, shuffle=shuffle, batch_size=batch_size)]
    for cut in range(max(len(mine) for mine in whole) + 1):
        sources = ranks_of(files, size, shuffle=shuffle, batch_size=batch_size)
        state = state_after(sources, [cut] * size)
        state = OrderState.from_json(json.loads(json.dumps(state.to_json())))
        for rank, source in enumerate(ranks_of(files, size, shuffle=shuffle, batch_size=batch_size)):
            assert same_batches(read_all(source, state), whole[rank][cut:])
    assert state.done


def state_after(sources: list[Source], cuts: list[int], state: OrderState | None = None,
                seen: list[int] | None = None) -> OrderState:
    """The state when rank r has taken cuts[r] batches; their rows go to ``seen``."""
    positions = []
    for source, cut in zip(sources, cuts, strict=True):
        with source.stream(state) as stream:
            taken = list(itertools.islice(stream, cut))
            positions.append(json.loads(json.dumps(stream.position())))
            if seen is not None:
                seen += flat(taken)
    return sources[0].merge_positions(positions)


def test_the_second_resume_is_right(files: list[Path]) -> None:
    whole = [read_all(s) for s in ranks_of(files, 2)]
    for first, second in ((1, 1), (3, 4), (5, 1), (0, 2), (2, 0), (9, 9)):
        state = state_after(ranks_of(files, 2), [first, first])
        state = state_after(ranks_of(files, 2), [second, second], state)
        third = state_after(ranks_of(files, 2), [1, 1], state)
        for rank in range(2):
            at = first + second
            assert same_batches(read_all(ranks_of(files, 2)[rank], state), whole[rank][at:])
            assert same_batches(read_all(ranks_of(files, 2)[rank], third), whole[rank][at + 1:])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("path", [(1, 2), (2, 1), (2, 3, 1), (4, 1, 3), (3, 2, 2, 4, 1), (2, 50), (50, 2)])
def test_another_number_of_ranks_loses_and_repeats_nothing(files: list[Path], path: tuple, shuffle: bool) -> None:
    for step in (1, 2):
        seen: list[int] = []
        state = None
        for n, size in enumerate(path):
            sources = ranks_of(files, size, shuffle=shuffle)
            if n == len(path) - 1:
                for source in sources:
                    seen += flat(read_all(source, state))
            else:
                # ranks that have come differently far
                state = state_after(sources, [step + (rank + n) % 3 for rank in range(size)], state, seen)
        assert sorted(seen) == list(range(ROWS))


def test_a_window_read_in_part_keeps_its_shuffle_on_another_number_of_ranks(files: list[Path]) -> None:
    whole = flat(read_all(ranks_of(files, 1)[0]))
    state = state_after(ranks_of(files, 1), [2])
    assert state.ranks[0][0].skip == 14 and len(state.ranks[0][0].blocks) == 3
    assert flat(read_all(ranks_of(files, 2)[0], state))[:7] == whole[14:21]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_stripes_of_all_ranks_are_the_batches_of_one(files: list[Path], size: int, shuffle: bool) -> None:
    more = {"shuffle": shuffle, "deal": "batch"}
    (one,) = ranks_of(files, 1, batch_size=5 * size, shuffle=shuffle)
    whole = row_numbers(read_all(one))
    sources = ranks_of(files, size, batch_size=5, **more)
    stripes = [read_all(s) for s in sources]
    assert len({len(mine) for mine in stripes}) == 1
    rows = [row_numbers(mine) for mine in stripes]
    assert [list(itertools.chain(*(rows[r][i] for r in range(size)))) for i in range(len(whole))] == whole
    assert all(len(mine) == 5 for r in range(size) for mine in rows[r][:-1])
    bad = sources[0].merge_bad_rows([s.bad_rows for s in sources])
    assert bad.total == ROWS
    for cut in (1, 4, len(whole)):
        state = state_after(ranks_of(files, size, batch_size=5, **more), [cut] * size)
        for rank, source in enumerate(ranks_of(files, size, batch_size=5, **more)):
            assert same_batches(read_all(source, state), stripes[rank][cut:])
        (other,) = ranks_of(files, 1, batch_size=5 * size, **more)
        assert row_numbers(read_all(other, state)) == whole[cut:]


def test_the_last_stripe_may_be_empty(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.tsv", 0, 23)
    batches = [read_all(s) for s in ranks_of([path], 4, deal="batch", batch_size=5)]
    assert [[b.size for b in mine] for mine in batches] == [[5, 3], [5, 0], [5, 0], [5, 0]]
    assert batches[3][1].dense.shape == (0, 1) and batches[3][1].offsets.tolist() == [0]


@pytest.mark.parametrize("shuffle", [True, False])
def test_packed_files_resume_inside(tmp_path: Path, shuffle: bool) -> None:
    paths = []
    for i, n in enumerate((120, 3, 1, 60, 0)):
        plain = write_rows(tmp_path / f"{i}.tsv", i * 200, n)
        paths.append(tmp_path / f"{i}.tsv.gz")
        paths[-1].write_bytes(gzip.compress(plain.read_bytes()))
    wanted = sorted([*range(120), 200, 201, 202, 400, *range(600, 660)])
    for size in (1, 2):
        make = lambda size=size: ranks_of(paths, size, shuffle=shuffle, block_bytes=90)  # noqa: E731
        whole = [read_all(s) for s in make()]
        assert sorted(row for mine in whole for row in flat(mine)) == wanted
        for cut in (1, 3, 8, 12):
            state = state_after(make(), [cut] * size)
            for rank in range(size):
                assert same_batches(read_all(make()[rank], state), whole[rank][cut:])
            seen: list[int] = []
            state = state_after(make(), [cut] * size, None, seen)
            for source in ranks_of(paths, 3, shuffle=shuffle, block_bytes=90):
                seen += flat(read_all(source, state))
            assert sorted(seen) == wanted
    if not shuffle:
        assert flat(read_all(ranks_of(paths, 1, shuffle=False)[0])) == wanted


def test_a_state_of_other_data_or_settings_is_refused(files: list[Path], tmp_path: Path) -> None:
    (source,) = ranks_of(files, 1)
    state = source.start(0)
    for other in (ranks_of(files, 1, seed=9), ranks_of(files, 1, shuffle=False), ranks_of(files, 1, block_bytes=50),
                  ranks_of(files[:1], 1), ranks_of(files, 1, split={"by": "hash"})):
        with pytest.raises(UsageError, match="the cursor to resume from was made on other files"):
            other[0].stream(state)
    ranks_of(files, 1, batch_size=3)[0].stream(state).close()         # the batch size may change


def test_positions_must_be_those_of_the_streams(files: list[Path]) -> None:
    sources = ranks_of(files, 2)
    positions = []
    for source in sources:
        with source.stream(source.start(1)) as stream:
            positions.append(stream.position())
    assert sources[0].merge_positions(positions).epoch == 1
    with pytest.raises(ValueError):
        sources[0].merge_positions(positions[:1])
    sources[0].stream(sources[0].start(2)).close()  # the next epoch may have begun
    assert sources[0].merge_positions(positions).epoch == 1
    sources[0].stream(sources[0].start(3)).close()
    with pytest.raises(ValueError):
        sources[0].merge_positions(positions)


def test_windows_and_what_remains_of_them() -> None:
    units = [Unit((4, 5), 3), *(Unit((b,)) for b in (9, 2, 7, 6, 1))]
    wins = windows(units, 2, lambda block: block == 7)
    assert wins == [Unit((4, 5), 3), Unit((9, 2)), Unit((7,)), Unit((6, 1))]
    for w in range(len(wins)):
        for skip in (0, 5):
            left = remaining(wins, w, skip)
            assert windows(left, 2, lambda block: block == 7)[1:] == wins[w + 1:]
            assert left[0] == (Unit(wins[w].blocks, skip or wins[w].skip) if skip or wins[w].skip
                               else Unit(wins[w].blocks[:1]))
    state = OrderState(0, "x", ((Unit((1, 2), 5), Unit((0,))), (Unit((3,)),)))
    assert deal(state, np.array([3, 2, 1, 0]), 3) == [[Unit((1, 2), 5)], [Unit((3,))], [Unit((0,))]]
    assert OrderState.from_json(json.loads(json.dumps(state.to_json()))) == state
