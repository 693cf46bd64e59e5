"""The oracle's lifecycle: which keys have rows, in plain dicts and one key occurrence after the other.

What it is, with periods of ``every`` samples (of all workers; period p ends with the step that brings their number to
(p + 1) * every or more):

- A key that has no row and had fewer than ``count_filter`` shows in earlier periods stands for its field's default
  key, whose row is never deleted. All other keys have a row, made when they are first seen.
- A show is an occurrence of the key; a click is one in a sample with label 1. Of a row they are counted while it is
  there, in 256ths: what it had before is multiplied by ``rate`` for each period that ended since it was last seen.
- At the end of a period the shows of keys without a row begin to count, and rows go that were not seen in the last
  ``ttl`` samples, or whose score, decayed once more, is below ``threshold``.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hpc_ctr.data.batch import Batch


@dataclass
class Lifecycle:
    """Settings (0 or 1 = off), and the state between passes. defaults: key of each field's default row."""

    defaults: list[int]
    every: int
    count_filter: int = 1
    reset: int = 0
    ttl: int = 0
    rate: float = 1.0
    threshold: float = 0.0
    nonclk: float = 0.1
    click: float = 1.0

    samples: int = 0
    counted: Counter = field(default_factory=Counter)  # shows of keys without a row, in earlier periods
    pending: Counter = field(default_factory=Counter)  # in this one
    life: dict = field(default_factory=dict)  # key -> [shows, clicks, end of the period in which it was last seen]
    done: Counter = field(default_factory=Counter)

    def open_pass(self, steps: list, rows: dict) -> list:
        """The batches of a pass with the keys that stand in for others; counts shows."""
        self.end = (self.samples // self.every + 1) * self.every
        self.seen, out = {}, []
        for step in steps:
            out.append([None if batch is None else self._replaced(batch, rows) for batch in step])
            self.samples += sum(batch.size for batch in step if batch is not None)
        self.done["rows_admitted"] += sum(key not in rows for key in self.seen)
        return out

    def _replaced(self, batch: Batch, rows: dict) -> Batch:
        keys = batch.keys.copy()
        for bag in range(len(batch.offsets) - 1 if batch.size else 0):
            number, sample = divmod(bag, batch.size)
            for i in range(batch.offsets[bag], batch.offsets[bag + 1]):
                key = int(keys[i])
                if key in rows or self.counted[key] >= self.count_filter or self.count_filter <= 1:
                    entry = self.seen.setdefault(key, [0, 0])
                    entry[0] += 1
                    entry[1] += int(batch.label[sample])
                else:
                    self.pending[key] += 1
                    self.done["shows_held_back"] += 1
                    keys[i] = self.defaults[number]
        return Batch(batch.label, batch.dense, keys, batch.offsets)

    def close_pass(self, rows: dict) -> None:
        """Count what the pass saw; decide, when a period ended with it."""
        for key, new in self.seen.items():
            old = self.life.get(key, [0.0, 0.0, self.end])
            keep = self.rate ** ((self.end - old[2]) // self.every)
            self.life[key] = [round(256 * old[i] * keep) / 256 + new[i] for i in (0, 1)] + [self.end]
        now = self.samples // self.every * self.every
        if now < self.end:
            return
        self.counted += self.pending
        self.pending.clear()
        if self.reset and now // self.reset > (self.end - self.every) // self.reset:
            self.counted.clear()
        for key, (show, click, last) in list(self.life.items()):
            score = self.nonclk * (show - click) + self.click * click
            old = self.ttl and now - last >= self.ttl
            if old or score * self.rate ** ((now - last) // self.every + 1) < self.threshold:
                self.done["rows_deleted_ttl" if old else "rows_deleted_score"] += 1
                del self.life[key], rows[key]


def life_as_dict(keys: np.ndarray, life: np.ndarray, defaults: list[int]) -> dict:
    """The same of stored rows, without default rows."""
    return {int(k): [int(row["show"]) / 256, int(row["click"]) / 256, int(row["last"])]
            for k, row in zip(keys, life) if int(k) not in defaults}
