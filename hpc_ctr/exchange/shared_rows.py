"""Rows that several replicas hold in a pass: their state at the last merge, and the merge through their owners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_ctr.comm.exchange import exchange_counts, exchange_rows
from hpc_ctr.embedding.table import OPTIMIZERS
from hpc_ctr.kernels.merge import RULES, merge_rows

if TYPE_CHECKING:
    from hpc_ctr.exchange.pass_rows import Owned, PassRows


class SharedRows:
    """Both sides of the merge on one rank.

    As owner: records [s, floats] and t uint32 [s], the state at the last merge ("ref"), and ``request``: positions in
    it of the shared rows of every home, in the order in which that home holds them; request_counts int64 [N].
    As home: slots int32 [h] of the shared rows, grouped by owner; slot_counts int64 [N]; slot_t, their t at the last
    merge. The lists of both sides run in the same order, so that a row travels with its position alone.
    """

    def __init__(self, records: np.ndarray, t: np.ndarray, request: np.ndarray, request_counts: np.ndarray):
        self.records = records
        self.t = t
        self.request = request
        self.request_counts = request_counts
        self.slots = np.zeros(0, np.int32)
        self.slot_counts = np.zeros_like(request_counts)
        self.slot_t = np.zeros(0, np.uint32)

    @classmethod
    def of_owner(cls, records: np.ndarray, t: np.ndarray, owned: Owned) -> SharedRows:
        """The owner's side, from all records [n, floats] that it hands out and which of them are shared."""
        number = np.cumsum(owned.shared) - 1
        wanted = owned.shared[owned.request]
        return cls(records[owned.shared], t[owned.shared], number[owned.request[wanted]],
                   _count_by_block(wanted, owned.request_counts))

    def take_slots(self, shared: np.ndarray, t: np.ndarray, owner_counts: np.ndarray) -> None:
        """The home's side: which of its slots are shared (bool [rows], grouped by owner), and their t."""
        self.slots = np.flatnonzero(shared).astype(np.int32)
        self.slot_counts = _count_by_block(shared, owner_counts)
        self.slot_t = t[self.slots].copy()

    def merge(self, rows: PassRows, window: int, rule: str) -> None:
        """Collect the copies that were stepped on, merge each row at its owner, and give it back to every holder."""
        world, trace, table = rows.replicas.world, rows.trace, rows.table
        _, now = rows.rows.read(self.slots)
        touched = now != self.slot_t
        counts = _count_by_block(touched, self.slot_counts)
        counts_in = exchange_counts(world, counts)
        position = _position_in_block(self.slot_counts)[touched]
        records, t = rows.rows.read(self.slots[touched])
        records, t, position = (exchange_rows(world, a, counts, counts_in, trace, "row_merge")
                                for a in (records, t, position))
        starts = np.concatenate([[0], np.cumsum(self.request_counts)])
        row = self.request[np.repeat(starts[:-1], counts_in) + position]

        order = np.argsort(row, kind="stable")  # copies of a row side by side, in rank order
        merged, first = np.unique(row[order], return_index=True)
        out = np.empty((len(merged), table.floats), table.dtype)
        out_t = np.empty(len(merged), np.uint32)
        merge_rows(np.append(first, len(order)), records[order], t[order], self.records[merged], self.t[merged],
                   float(window), RULES[rule], float(len(rows.replicas.groups)), OPTIMIZERS.index(table.optimizer),
                   table.width, table.beta1, table.beta2, out, out_t)
        self.records[merged], self.t[merged] = out, out_t

        is_merged = np.zeros(len(self.t), bool)
        is_merged[merged] = True
        back = is_merged[self.request]
        counts = _count_by_block(back, self.request_counts)
        counts_in = exchange_counts(world, counts)
        position = _position_in_block(self.request_counts)[back]
        row = self.request[back]
        records, t, position = (exchange_rows(world, a, counts, counts_in, trace, "row_merge")
                                for a in (self.records[row], self.t[row], position))
        starts = np.concatenate([[0], np.cumsum(self.slot_counts)])
        at = np.repeat(starts[:-1], counts_in) + position
        rows.rows.write(self.slots[at], records, t)
        self.slot_t[at] = t


def _count_by_block(flags: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many of ``flags`` are set in each of the consecutive blocks of ``counts`` entries: int64 [N]."""
    sums = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    ends = np.cumsum(counts)
    return sums[ends] - sums[ends - counts]


def _position_in_block(counts: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... inside each of the consecutive blocks of ``counts`` entries: int32."""
    starts = np.cumsum(counts) - counts
    return (np.arange(int(counts.sum())) - np.repeat(starts, counts)).astype(np.int32)
