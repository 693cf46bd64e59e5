"""The global order of the data, and the cursor in it, which means the same for any number of ranks.

Epoch e's sequence of blocks is a seeded permutation (or the order of the files). What is left of an epoch is a list of
units a rank; ``deal`` gives it out. Consecutive whole blocks of a rank form windows, whose rows are shuffled together;
a window read in part is one unit: its blocks, and how many of its shuffled rows are done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_ctr.data.keys import permutation
from hpc_ctr.errors import UsageError

_SEQUENCE, _ROWS = 1, 2                # what a permutation is for


@dataclass(frozen=True)
class Unit:
    """Blocks whose rows are shuffled together, of which the first ``skip`` rows are done."""

    blocks: tuple[int, ...]
    skip: int = 0

    @property
    def partial(self) -> bool:
        """Whether it is a window that keeps its own shuffle, and joins no other."""
        return self.skip > 0 or len(self.blocks) > 1


@dataclass(frozen=True)
class OrderState:
    """What is left of epoch ``epoch``: units a rank; None = all of it, not yet dealt.

    layout: digest of the blocks and of the settings that the order depends on.
    """

    epoch: int
    layout: str
    ranks: tuple[tuple[Unit, ...], ...] | None = None

    @property
    def done(self) -> bool:
        """Whether no rank has anything left."""
        return self.ranks is not None and not any(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Lists, dicts, numbers and texts only."""
        ranks = None if self.ranks is None else [
            {"partial": [[list(u.blocks), u.skip] for u in units if u.partial],
             "blocks": [u.blocks[0] for u in units if not u.partial]} for units in self.ranks]
        return {"epoch": self.epoch, "layout": self.layout, "ranks": ranks}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> "OrderState":
        """The state that ``to_json`` gave."""
        ranks = entry["ranks"]
        if ranks is not None:
            ranks = tuple(tuple([Unit(tuple(blocks), skip) for blocks, skip in rank["partial"]]
                                + [Unit((block,)) for block in rank["blocks"]]) for rank in ranks)
        return OrderState(int(entry["epoch"]), str(entry["layout"]), ranks)


def sequence(num_blocks: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Block ids, int64 [num_blocks], in the order of this epoch."""
    return permutation(num_blocks, _SEQUENCE, seed, epoch) if shuffle else np.arange(num_blocks)


def row_order(n: int, seed: int, epoch: int, first_block: int, part: int) -> np.ndarray:
    """Order, int64 [n], of the rows of part ``part`` of the window that begins with block ``first_block``."""
    return permutation(n, _ROWS, seed, epoch, first_block, part)


def deal(state: OrderState, order: np.ndarray, num_ranks: int) -> list[list[Unit]]:
    """Units of every rank. order: the epoch's ``sequence``.

    With as many ranks as the state was left by, each gets back its own; else what is left is dealt anew, windows read
    in part first, then in the order of the epoch.
    """
    if state.ranks is None:
        todo = [Unit((int(block),)) for block in order]
    elif len(state.ranks) == num_ranks:
        return [list(units) for units in state.ranks]
    else:
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        todo = sorted((u for units in state.ranks for u in units),
                      key=lambda u: (not u.partial, place[u.blocks[0]]))
    return [todo[rank::num_ranks] for rank in range(num_ranks)]


def windows(units: Sequence[Unit], most: int, alone: Callable[[int], bool]) -> list[Unit]:
    """Windows of a rank's units: up to ``most`` consecutive whole blocks; a partial unit, or a block that is to stay
    ``alone``, is a window by itself."""
    result: list[Unit] = []
    open_blocks: list[int] = []

    def close() -> None:
        if open_blocks:
            result.append(Unit(tuple(open_blocks)))
            open_blocks.clear()

    for unit in units:
        if unit.partial or alone(unit.blocks[0]):
            close()
            result.append(unit)
            continue
        open_blocks.append(unit.blocks[0])
        if len(open_blocks) == most:
            close()
    close()
    return result


def remaining(windows_of_rank: Sequence[Unit], window: int, skip: int) -> list[Unit]:
    """Units that are left after ``window`` whole windows and ``skip`` rows of the next one."""
    left: list[Unit] = []
    for i, unit in enumerate(windows_of_rank[window:]):
        if i == 0 and skip:
            left.append(Unit(unit.blocks, skip))
        elif unit.skip:
            left.append(unit)
        else:
            left += [Unit((block,)) for block in unit.blocks]
    return left


def check_layout(state: OrderState, layout: str) -> None:
    """Raises UsageError when the state was made on other data or with other settings of the order."""
    if state.layout != layout:
        raise UsageError("data: the cursor to resume from was made on other files, or with another seed, schema, "
                         "split, shuffle, shuffle_blocks, block_bytes or deal; set them as they were, or start "
                         "without resuming")
