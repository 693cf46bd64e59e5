"""Rows that could not be read: how many, which first, and when there are too many."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpc_ctr.errors import DataError

# below so many rows read, a share says little: a stream stops early only for more bad rows than it allows in these
EARLY_ROWS = 100_000


@dataclass
class BadRows:
    """Of ``total`` rows read, ``count`` were bad; the first ones as (file, line from 1, reason).

    unmatched: rows whose user or item is not in the side table, by side ("user", "item"): read with missing features.
    """

    count: int = 0
    total: int = 0
    examples: list[tuple[str, int, str]] = field(default_factory=list)
    unmatched: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def merge(parts: "Sequence[BadRows]", most: int = 20) -> "BadRows":
        """Of all ranks together; at most ``most`` examples, by file and line."""
        merged = BadRows(sum(p.count for p in parts), sum(p.total for p in parts))
        merged.examples = sorted({e for p in parts for e in p.examples})[:most]
        for part in parts:
            for side, n in part.unmatched.items():
                merged.unmatched[side] = merged.unmatched.get(side, 0) + n
        return merged

    def check(self, max_share: float, at_least: int = 0) -> None:
        """Raises DataError when more than ``max_share`` of the rows (counted as at least ``at_least``) are bad."""
        if self.count > max_share * max(self.total, at_least):
            file, line, reason = self.examples[0] if self.examples else ("?", 0, "?")
            raise DataError(f"{self.count} of {self.total} rows cannot be read, more than data.max_bad_share = "
                            f"{max_share:g} allows; the first: {file}, line {line}: {reason}")

    def lines(self) -> list[str]:
        """The report, a line of text each."""
        text = [f"{self.count} bad rows of {self.total}"] if self.count else []
        text += [f"  {os.fspath(file)}, line {line}: {reason}" for file, line, reason in self.examples]
        text += [f"{n} rows whose {side} is not in data.{side}_file were read with missing features"
                 for side, n in self.unmatched.items() if n]
        return text


class BadRowLog:
    """Collects bad rows in the reading thread; snapshots are taken from any thread.

    The line number of a block's first line is worked out only when a bad row of it must be shown.
    """

    def __init__(self, most: int, max_share: float, first: BadRows | None = None):
        """most: so many examples are kept. first: bad rows found before the reading began."""
        self._most, self._max_share = most, max_share
        self._lock = threading.Lock()
        first = first or BadRows()
        self._bad = BadRows(first.count, first.total, list(first.examples), dict(first.unmatched))
        self._pending: list[tuple[str, int, str, Callable[[], int]]] = []

    def add(self, file: str, first_line: Callable[[], int], lines: int, bad_count: int,
            bad: Sequence[tuple[int, str]], unmatched: dict[str, int]) -> None:
        """Counts a chunk. bad: (line from 0 within the chunk, reason). Raises DataError when it is too much."""
        with self._lock:
            self._bad.total += lines
            self._bad.count += bad_count
            room = self._most - len(self._bad.examples) - len(self._pending)
            self._pending += [(file, line, reason, first_line) for line, reason in bad[:max(room, 0)]]
            for side, n in unmatched.items():
                self._bad.unmatched[side] = self._bad.unmatched.get(side, 0) + n
            too_many = self._bad.count > self._max_share * max(self._bad.total, EARLY_ROWS)
        if too_many:
            self.snapshot().check(self._max_share, EARLY_ROWS)

    def snapshot(self) -> BadRows:
        """What is known so far, with the line numbers in the files."""
        with self._lock:
            self._bad.examples += [(file, first_line() + line, reason)
                                   for file, line, reason, first_line in self._pending]
            self._pending.clear()
            return BadRows(self._bad.count, self._bad.total, list(self._bad.examples), dict(self._bad.unmatched))
