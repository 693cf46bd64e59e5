"""The lifecycle of a table's rows on a rank: what its owner knows about the keys that all ranks see in a pass."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_ctr.comm.exchange import exchange_counts, exchange_rows
from hpc_ctr.comm.session import together
from hpc_ctr.comm.trace import Trace
from hpc_ctr.embedding.table import Table
from hpc_ctr.embedding.working_set import PassKeys, Shows
from hpc_ctr.exchange.replicas import owners_of
from hpc_ctr.kernels.dedup import dedup
from hpc_ctr.storage.lifecycle import KEPT, CountFilter, score_due, touch, ttl_due
from hpc_ctr.storage.tiered import TieredStore

COUNTS = ("rows_admitted", "shows_held_back", "rows_deleted_ttl", "rows_deleted_score")


@dataclass(frozen=True)
class Seen:
    """What an owner learns of a pass: keys uint64 [n], distinct, with their shows and clicks on all ranks, int64 [n],
    and whether each has or gets a row, bool [n]; end: the sample count at which the pass's period ends."""

    keys: np.ndarray
    shows: np.ndarray
    clicks: np.ndarray
    admitted: np.ndarray
    end: int


class TableLifecycle:
    """Admission, counts and deletion of one table's rows on the rank that owns them.

    table: one with a lifecycle; defaults: keys uint64 [F] of its fields' default rows. counts: what was done so far;
    in_period: since the period began.
    """

    def __init__(self, table: Table, defaults: np.ndarray, rank: int, ranks: int):
        self.table = table
        self.options = table.lifecycle
        self.defaults = defaults
        self.filter = CountFilter(self.options, rank, ranks) if self.options.filters else None
        self.counts = dict.fromkeys(COUNTS, 0)
        self.in_period = dict.fromkeys(COUNTS, 0)

    def meet(self, comm: Any, store: TieredStore, keys: PassKeys, seen: Shows, samples: int,
             trace: Trace) -> tuple[PassKeys, Seen]:
        """Tell the owners what this rank sees in a pass that begins after ``samples`` samples. Collective.

        Returns the pass's keys, those that have to wait for a row replaced by their field's default key, and what
        this rank learns as an owner. Nothing changes: the pass may be given up, and announced anew.
        """
        owner = owners_of(keys.keys, comm.size)
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=comm.size).astype(np.int64)
        counts_in = exchange_counts(comm, counts)
        mine = keys.keys[order], np.stack([seen.shows, seen.clicks], 1)[order]
        asked, amounts = (exchange_rows(comm, rows, counts, counts_in, trace, "lifecycle") for rows in mine)
        distinct, inverse = dedup(asked)
        # whole numbers below 2^53 add up exactly in any order
        shows, clicks = (np.bincount(inverse, amounts[:, i], len(distinct)).astype(np.int64) for i in range(2))
        every = self.options.every
        end = (samples // every + 1) * every
        admitted = np.ones(len(distinct), bool)
        if self.filter:
            with together(comm):
                admitted = self.filter.admits(distinct)
                waiting = np.flatnonzero(~admitted)
                admitted[waiting] = store.has(distinct[waiting])
            answer = exchange_rows(comm, admitted[inverse], counts_in, counts, trace, "lifecycle")
            known = np.empty(len(order), bool)
            known[order] = answer
            if not known.all():
                keys = keys.replaced(np.where(known, keys.keys, self.defaults[seen.field]))
        return keys, Seen(distinct, shows, clicks, admitted, end)

    def begin(self, keys: np.ndarray, missing: np.ndarray) -> None:
        """Rows were made for ``keys[missing]``."""
        self._count("rows_admitted", len(missing) - int(np.isin(keys[missing], self.defaults).sum()))

    def finish(self, seen: Seen, keys: np.ndarray, life: np.ndarray) -> None:
        """The pass has ended: count what was seen. keys: those of the rows that it used, and their LIFE, changed."""
        _, place = dedup(np.concatenate([keys, seen.keys]))
        place = place[len(keys):]
        shows, clicks = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        here = place < len(keys)
        shows[place[here]], clicks[place[here]] = seen.shows[here], seen.clicks[here]
        touch(life, shows, clicks, seen.end, self.options)
        life[np.isin(keys, self.defaults)] = (0, 0, KEPT)
        if self.filter:
            waiting = ~seen.admitted
            self.filter.add(seen.keys[waiting], seen.shows[waiting])
            self._count("shows_held_back", int(seen.shows[waiting].sum()))

    def end_period(self, store: TieredStore, before: int, now: int) -> dict[str, int]:
        """Decide what is to be decided between two periods, at sample ``now``, a multiple of ``every``; ``before``:
        the last such. Returns what the period was, and the rows and counters in use after it."""
        options = self.options
        if self.filter:
            self.filter.commit()
            reset = options.count_filter_reset
            if reset and now // reset > before // reset:
                self.filter.reset()
        if options.deletes:
            store.shrink(now, lambda life: np.minimum(ttl_due(life, options), score_due(life, options)),
                         lambda life: self._count_deleted(life, now))
        facts = self.in_period | {"rows": store.rows}
        if self.filter:
            facts |= {"filter_counters": self.filter.counters[:, 0].size,
                      "filter_counters_used": int(np.count_nonzero(self.filter.counters[:, 0]))}
        self.in_period = dict.fromkeys(COUNTS, 0)
        return facts

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it on this rank."""
        out = {"in_period": np.array([self.in_period[name] for name in COUNTS])}
        return out | ({"filter": self.filter.counters} if self.filter else {})

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Take over what ``state`` gave; what is not there starts anew."""
        if "in_period" in state:
            self.in_period = dict(zip(COUNTS, map(int, state["in_period"])))
        if self.filter and "filter" in state:
            self.filter.load(state["filter"])

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] += amount
        self.in_period[name] += amount

    def _count_deleted(self, life: np.ndarray, now: int) -> None:
        old = int(np.count_nonzero(ttl_due(life, self.options) <= now))
        self._count("rows_deleted_ttl", old)
        self._count("rows_deleted_score", len(life) - old)
