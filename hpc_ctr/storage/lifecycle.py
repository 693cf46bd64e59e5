"""When a key gets a row, and when a row goes: settings, the filter that counts shows, and the score of a row.

`docs/lifecycle.md` says what the settings mean together.
"""

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hpc_ctr.errors import UsageError
from hpc_ctr.kernels import shows as kernels
from hpc_ctr.storage.record import LATER, UNIT
from hpc_ctr.units import parse_bytes

SHARDS = 1024
_SHIFT = np.uint64(54)
KEPT = 1 << 62  # last sample of a row that never goes
_MOST_UNITS = 2**32 - 1
_LEAST_WIDTH = 16


@dataclass
class LifecycleOptions:
    """Which keys get rows and which rows go. All but ``every`` can be given for a table: embedding.tables[].lifecycle."""

    every: int = 0  # samples, of all ranks, from one decision to the next; 0 = every key has a row for ever
    count_filter: int = 1  # shows that give a key a row, at most 255; until then its field's default row stands in
    count_filter_bytes: int | str = "64MiB"  # for a table's show counters, on all ranks together
    count_filter_reset: int = 0  # samples after which these counters start anew; 0 = never
    ttl: int = 0  # rows that were not seen for so many samples are deleted; 0 = none (Paddle: delete_after_unseen_days)
    show_click_decay_rate: float = 1.0  # what a row's shows and clicks are multiplied by, every ``every`` samples
    delete_threshold: float = 0.0  # rows with a lower score are deleted; 0 = none
    nonclk_coeff: float = 0.1  # score = nonclk_coeff * (show - click) + click_coeff * click
    click_coeff: float = 1.0  # see nonclk_coeff

    def check(self, prefix: str = "lifecycle.") -> None:
        """Raises UsageError naming the setting, after ``prefix``."""
        for name, most in (("every", KEPT), ("count_filter", kernels.MOST), ("count_filter_reset", KEPT), ("ttl", KEPT)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                limit = f" to {most}" if most < KEPT else " upwards"
                raise UsageError(f"{prefix}{name}: must be a whole number from 0{limit}, not {value!r}")
        for name in ("show_click_decay_rate", "delete_threshold", "nonclk_coeff", "click_coeff"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise UsageError(f"{prefix}{name}: must be a number of at least 0, not {value!r}")
        if not 0 < self.show_click_decay_rate <= 1:
            raise UsageError(f"{prefix}show_click_decay_rate: must be above 0 and at most 1, not "
                             f"{self.show_click_decay_rate!r}")
        least = SHARDS * 2 * kernels.ROWS * _LEAST_WIDTH
        if parse_bytes(self.count_filter_bytes, f"{prefix}count_filter_bytes") < least:
            raise UsageError(f"{prefix}count_filter_bytes: must be at least {least >> 10}KiB, not "
                             f"{self.count_filter_bytes!r}")
        if not self.every:
            for name, asks in (("count_filter", self.filters), ("count_filter_reset", self.count_filter_reset),
                               ("ttl", self.ttl), ("show_click_decay_rate", self.show_click_decay_rate != 1),
                               ("delete_threshold", self.delete_threshold)):
                if asks:
                    raise UsageError(f"{prefix}{name}: nothing is decided without lifecycle.every; set it to the number "
                                     "of samples from one decision to the next")

    def for_table(self, own: Any, prefix: str) -> "LifecycleOptions":
        """These settings with a table's own ones (a mapping, or None). Raises UsageError naming the setting."""
        if own is None:
            return self
        known = {f.name for f in fields(self)} - {"every"}
        if not isinstance(own, dict):
            raise UsageError(f"{prefix[:-1]}: must be a section with settings, not {own!r}")
        for key in own.keys() - known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            raise UsageError(f"{prefix}{key}: unknown setting; "
                             + (f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"))
        special = replace(self, **own)
        special.check(prefix)
        return special

    @property
    def filters(self) -> bool:
        """Whether keys have to wait for their rows."""
        return self.count_filter > 1

    @property
    def deletes(self) -> bool:
        """Whether rows are ever deleted."""
        return self.ttl > 0 or self.delete_threshold > 0

    @property
    def filter_width(self) -> int:
        """Counters in a line of a shard."""
        return parse_bytes(self.count_filter_bytes) // (SHARDS * 2 * kernels.ROWS)

    def filter_bytes(self, rank: int, ranks: int) -> int:
        """Bytes of the filter on a rank."""
        first, behind = shards_of(rank, ranks)
        return (behind - first) * 2 * kernels.ROWS * self.filter_width if self.filters else 0


def shards_of(rank: int, ranks: int) -> tuple[int, int]:
    """The shards [first, behind) that a rank owns."""
    first, behind = (-(-at * SHARDS // ranks) for at in (rank, rank + 1))
    return first, behind


class CountFilter:
    """Counts the shows of keys that have no row, in memory that does not grow.

    A count is never too low; docs/lifecycle.md says how often it is too high. What is added counts from the next
    ``commit`` on. Every shard has counters of its own, so that the counts do not depend on the number of ranks.
    """

    def __init__(self, options: LifecycleOptions, rank: int, ranks: int):
        self.shows = options.count_filter
        self._first, behind = shards_of(rank, ranks)
        # [committed, pending] one after the other in each shard, so that a shard is one block
        self.counters = np.zeros((behind - self._first, 2, kernels.ROWS, options.filter_width), np.uint8)

    def admits(self, keys: np.ndarray) -> np.ndarray:
        """Whether ``keys`` uint64 [n] had their shows before the last commit, bool [n]."""
        counts = np.empty(len(keys), np.uint8)
        kernels.estimate(self.counters[:, 0], _SHIFT, self._first, keys, counts)
        return counts >= self.shows

    def add(self, keys: np.ndarray, shows: np.ndarray) -> None:
        """Count ``shows`` int64 [n] of ``keys`` uint64 [n] distinct."""
        kernels.count(self.counters[:, 1], _SHIFT, self._first, keys, shows)

    def commit(self) -> None:
        """From here on the shows that were added count."""
        for committed, pending in self.counters.reshape(len(self.counters), 2, -1):
            kernels.commit(committed, pending)

    def reset(self) -> None:
        """Start anew."""
        self.counters[:] = 0

    def load(self, counters: np.ndarray) -> None:
        """Take over ``counters`` of these shards, or of all. Raises UsageError when they are of another size."""
        if len(counters) == SHARDS:
            counters = counters[self._first:self._first + len(self.counters)]
        if counters.shape != self.counters.shape:
            raise UsageError("lifecycle.count_filter_bytes: the checkpoint has counters of another size; set it as in "
                             "the job that wrote it")
        self.counters[:] = counters


def touch(life: np.ndarray, shows: np.ndarray, clicks: np.ndarray, end: int, options: LifecycleOptions) -> None:
    """Count ``shows`` and ``clicks`` int64 [n] of rows, LIFE [n], that were seen in the period that ends at sample
    ``end``; what they had before decays by the periods that ended since they were last seen."""
    ended = np.maximum(end - life["last"].astype(np.int64), 0) // options.every
    keep = options.show_click_decay_rate ** ended
    for name, new in (("show", shows), ("click", clicks)):
        before = np.rint(life[name] * keep).astype(np.int64)  # whole units: sums in any order are the same bits
        life[name] = np.minimum(before + new * round(1 / UNIT), _MOST_UNITS)
    life["last"] = end


def score_due(life: np.ndarray, options: LifecycleOptions) -> np.ndarray:
    """The end of the first period, int64 [n], after whose decay the score of a row that is not seen again is below
    delete_threshold; LATER for none."""
    last = life["last"].astype(np.int64)
    show, click = life["show"] * UNIT, life["click"] * UNIT
    score = options.nonclk_coeff * (show - click) + options.click_coeff * click
    rate, threshold = options.show_click_decay_rate, options.delete_threshold
    if rate == 1:
        return np.where(score < threshold, last, LATER)
    with np.errstate(divide="ignore", invalid="ignore"):
        decays = np.log(threshold / score) / np.log(rate)
    decays = np.where(np.isfinite(decays), np.floor(np.clip(decays, 0, 1e9)), 0)  # to 1 from where it may be
    for _ in range(3):
        decays += score * rate ** decays >= threshold
    decays = np.maximum(decays, 1).astype(np.int64)
    return np.where(threshold > 0, last + (decays - 1) * options.every, LATER)


def ttl_due(life: np.ndarray, options: LifecycleOptions) -> np.ndarray:
    """The sample count, int64 [n], from which a row that is not seen again is older than ttl; LATER for none."""
    return life["last"].astype(np.int64) + options.ttl if options.ttl else np.full(len(life), LATER)
