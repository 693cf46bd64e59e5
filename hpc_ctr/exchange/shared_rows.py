"""Rows that several replicas hold in a pass: their state at the last merge, and the merge through their owners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_ctr.comm.exchange import exchange_counts, exchange_rows
from hpc_ctr.embedding.table import OPTIMIZERS
from hpc_ctr.kernels.merge import RULES, merge_state, merge_x

if TYPE_CHECKING:
    from hpc_ctr.exchange.pass_rows import Owned, PassRows


class SharedRows:
    """Both sides of the merge on one rank.

    As owner: records [s, floats] and t uint32 [s], the state at the last merge ("ref"), and ``request``: positions in
    it of the shared rows of every home, in the order in which that home holds them; request_counts int64 [N].
    As home: slots int32 [h] of the shared rows, grouped by owner; slot_counts int64 [N]; slot_t, their t at the last
    merge, and first_t, when their state was merged last. The lists of both sides run in the same order, so that a row
    travels with its position alone.

    Where merges inside a pass move x alone (rows.window: x), each home keeps its own state and t until the pass ends;
    of ``records`` and ``t`` only x is newer than the beginning of the pass then.
    """

    def __init__(self, records: np.ndarray, t: np.ndarray, request: np.ndarray, request_counts: np.ndarray):
        self.records = records
        self.t = t
        self.request = request
        self.request_counts = request_counts
        self.slots = np.zeros(0, np.int32)
        self.slot_counts = np.zeros_like(request_counts)
        self.slot_t = np.zeros(0, np.uint32)
        self.first_t = self.slot_t
        self.steps = 0  # since the state was merged last

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
        self.first_t = self.slot_t.copy()

    def merge(self, rows: PassRows, window: int, rule: str, kind: str = "full", last: bool = False) -> None:
        """Collect the copies that were stepped on, merge each row at its owner, and give it back to every holder.

        window: steps since the last merge. kind: full, or x: only x is merged, but at the last merge of a pass. The
        last merge leaves the rows with their owners, for the homes let go of them.
        """
        self.steps += window
        state = kind == "full" or last
        copies, touches, state_touches, row = self._collect(rows, state, two=kind == "x" and last)
        order = np.argsort(row, kind="stable")  # copies of a row side by side, in rank order
        merged, first = np.unique(row[order], return_index=True)
        copies, touches, state_touches = copies[order], touches[order], state_touches[order]
        table, starts = rows.table, np.append(first, len(order))
        ref, weigh = self.records[merged], (RULES[rule], float(len(rows.replicas.groups)))
        out = np.empty((len(merged), copies.shape[1]), table.dtype)
        merge_x(starts, copies, touches, ref, float(window), *weigh, table.width, out)
        if state:
            out_t = np.empty(len(merged), np.uint32)
            merge_state(starts, copies, state_touches, ref, self.t[merged], float(self.steps), *weigh,
                        OPTIMIZERS.index(table.optimizer), table.width, table.beta1, table.beta2, out, out_t)
            self.t[merged] = out_t
            self.steps = 0
        self.records[merged, :out.shape[1]] = out
        if not last:
            self._give_back(rows, merged, state)

    def _collect(self, rows: PassRows, state: bool, two: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Copies [c, floats or width], their steps since the last merge and since their state was merged (both
        float64 [c]), and their places in ``records``: those that were stepped on, from all homes in rank order.
        two: the two counts of steps may differ, and both travel."""
        world, trace = rows.replicas.world, rows.trace
        now = rows.rows.steps(self.slots)
        since = self.first_t if state else self.slot_t
        touched = now != since
        counts = _count_by_block(touched, self.slot_counts)
        counts_in = exchange_counts(world, counts)
        slots = self.slots[touched]
        touches = [now[touched] - self.slot_t[touched]]
        if two:
            touches.append(now[touched] - since[touched])
        self.slot_t = now
        sent = (rows.rows.read(slots)[0] if state else rows.rows.values(slots).cpu().numpy(),
                np.stack(touches, axis=1), _position_in_block(self.slot_counts)[touched])
        copies, touches, position = (exchange_rows(world, a, counts, counts_in, trace, "row_merge") for a in sent)
        starts = np.concatenate([[0], np.cumsum(self.request_counts)])
        row = self.request[np.repeat(starts[:-1], counts_in) + position]
        touches = touches.astype(np.float64)
        return copies, np.ascontiguousarray(touches[:, 0]), np.ascontiguousarray(touches[:, -1]), row

    def _give_back(self, rows: PassRows, merged: np.ndarray, state: bool) -> None:
        """Send the rows ``merged`` of ``records`` to everyone who holds them, which takes them."""
        world, trace = rows.replicas.world, rows.trace
        is_merged = np.zeros(len(self.t), bool)
        is_merged[merged] = True
        back = is_merged[self.request]
        counts = _count_by_block(back, self.request_counts)
        counts_in = exchange_counts(world, counts)
        row = self.request[back]
        sent = [_position_in_block(self.request_counts)[back],
                self.records[row] if state else self.records[row, :rows.table.width]]
        if state:
            sent.append(self.t[row])
        position, records, *t = (exchange_rows(world, a, counts, counts_in, trace, "row_merge") for a in sent)
        starts = np.concatenate([[0], np.cumsum(self.slot_counts)])
        at = np.repeat(starts[:-1], counts_in) + position
        if state:
            rows.rows.write(self.slots[at], records, t[0])
            self.slot_t[at] = self.first_t[at] = t[0]
        else:
            rows.rows.write_values(self.slots[at], records)


def _count_by_block(flags: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many of ``flags`` are set in each of the consecutive blocks of ``counts`` entries: int64 [N]."""
    sums = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    ends = np.cumsum(counts)
    return sums[ends] - sums[ends - counts]


def _position_in_block(counts: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... inside each of the consecutive blocks of ``counts`` entries: int32."""
    starts = np.cumsum(counts) - counts
    return (np.arange(int(counts.sum())) - np.repeat(starts, counts)).astype(np.int32)
