"""The rows of one table during one pass: from owners to homes, values and gradients in steps, and back to owners."""

from dataclasses import dataclass

import numpy as np
import torch

from hpc_ctr.comm.exchange import exchange_counts, exchange_rows
from hpc_ctr.comm.trace import Trace
from hpc_ctr.embedding.device_table import DeviceTable
from hpc_ctr.embedding.init import init_rows
from hpc_ctr.embedding.table import Table
from hpc_ctr.embedding.working_set import WorkingSet
from hpc_ctr.exchange.lifecycle import Seen, TableLifecycle
from hpc_ctr.exchange.replicas import Replicas, owners_of
from hpc_ctr.exchange.shared_rows import SharedRows
from hpc_ctr.kernels.dedup import dedup
from hpc_ctr.storage.tiered import TieredStore


@dataclass
class Home:
    """What a rank knows as the home of rows: who needs which slot in which step, and whose the rows are.

    keys: uint64 [rows], one a slot, grouped by owner; owner_counts int64 [N].
    serve: for each step, int32 slots asked for by the replica's members, in rank order; serve_counts int64 [steps, R].
    """

    keys: np.ndarray
    owner_counts: np.ndarray
    serve: list[np.ndarray]
    serve_counts: np.ndarray


@dataclass
class Owned:
    """What a rank knows as the owner of rows that are out for the pass.

    keys: uint64 [n] distinct. request: int64 positions in ``keys`` of what every home asked for, in rank order;
    request_counts int64 [N]. shared: bool [n], rows held by two or more replicas.
    """

    keys: np.ndarray
    request: np.ndarray
    request_counts: np.ndarray
    shared: np.ndarray


class PassRows:
    """One table's rows in one pass, as this rank sees them. Every method but ``values`` for one rank is collective."""

    def __init__(self, table: Table, working_set: WorkingSet, home: Home, replicas: Replicas, trace: Trace):
        self.table = table
        self.lifecycle: TableLifecycle | None = None  # with ``seen``, what it met, of tables that have one
        self.seen: Seen | None = None
        self.life: np.ndarray | None = None  # of the rows that this rank owns
        self.working_set = working_set
        self.home = home
        self.replicas = replicas
        self.trace = trace
        self.rows: DeviceTable | None = None
        self.owned: Owned | None = None
        self.ref: SharedRows | None = None

    def ask(self) -> None:
        """Tell the owners which rows this home wants."""
        world, home = self.replicas.world, self.home
        if self.replicas.several:
            counts = exchange_counts(world, home.owner_counts)
            asked = exchange_rows(world, home.keys, home.owner_counts, counts, self.trace, "pull")
            keys, request = dedup(asked)
            shared = np.bincount(request, minlength=len(keys)) > 1
            self.owned = Owned(keys, request.astype(np.int64), counts, shared)
        else:  # one replica: every owner is the home of its own rows
            counts = home.owner_counts
            self.owned = Owned(home.keys, np.zeros(0, np.int64), counts, np.zeros(0, bool))

    def pull(self, store: TieredStore, seed: int, device: torch.device) -> None:
        """Bring the rows from their owners into this home's device table; owners create the rows that do not exist.
        ``ask`` goes before."""
        world, table, home = self.replicas.world, self.table, self.home
        counts = self.owned.request_counts
        rows, t, missing = read_or_create(store, table, self.owned.keys, seed)
        records = np.ascontiguousarray(store.layout.records(rows))
        if self.lifecycle:
            self.life = store.layout.life(rows).copy()
            self.lifecycle.begin(self.owned.keys, missing)
        shared_here = np.zeros(0, bool)
        if self.replicas.several:
            request = self.owned.request
            out = records[request], t[request], self.owned.shared[request]
            self.ref = SharedRows.of_owner(records, t, self.owned)
            records, t, shared_here = (exchange_rows(world, rows, counts, home.owner_counts, self.trace, "pull")
                                       for rows in out)
        self.rows = DeviceTable(table, records, t, device)
        if self.replicas.several:
            self.ref.take_slots(shared_here, t, home.owner_counts)

    def values(self, step: int) -> torch.Tensor:
        """x of the rows that this rank's batch of ``step`` needs: [u, width] on the device, in ``needs`` order."""
        own = self.rows.values(self.home.serve[step])
        return self._move(own, self.home.serve_counts[step], self.working_set.need_counts[step], "values")

    def apply(self, step: int, grads: torch.Tensor) -> None:
        """Send gradients [u, width] to the homes and take one row-optimizer step on the sum over the replica."""
        mine = self._move(grads, self.working_set.need_counts[step], self.home.serve_counts[step], "gradients")
        self.rows.step(self.home.serve[step], mine)

    def merge(self, window: int, rule: str, kind: str = "full", last: bool = False) -> None:
        """Merge the shared rows between replicas: see SharedRows.merge."""
        if self.replicas.several:
            self.ref.merge(self, window, rule, kind, last)

    def push(self, store: TieredStore) -> None:
        """Send the rows back to their owners, which keep them. After the pass's last merge, if steps were taken."""
        owned, home = self.owned, self.home
        if not self.replicas.several:
            self._put(store, *self.rows.read(slice(None)))
        else:
            records = np.empty((len(owned.keys), self.table.floats), self.table.dtype)
            t = np.empty(len(owned.keys), np.uint32)
            exclusive = np.setdiff1d(np.arange(len(home.keys)), self.ref.slots, assume_unique=True)
            counts = home.owner_counts - self.ref.slot_counts
            counts_in = owned.request_counts - self.ref.request_counts
            sent = [exchange_rows(self.replicas.world, rows, counts, counts_in, self.trace, "push")
                    for rows in self.rows.read(exclusive)]
            at = owned.request[~owned.shared[owned.request]]
            records[at], t[at] = sent
            records[owned.shared], t[owned.shared] = self.ref.records, self.ref.t
            self._put(store, records, t)
        self.rows = self.owned = self.ref = self.life = None

    def _put(self, store: TieredStore, records: np.ndarray, t: np.ndarray) -> None:
        """Give the rows that this rank owns back to its store."""
        rows = records
        if self.lifecycle:
            self.lifecycle.finish(self.seen, self.owned.keys, self.life)
            rows = store.layout.empty(len(records))
            store.layout.records(rows)[:], store.layout.life(rows)[:] = records, self.life
        store.put(self.owned.keys, rows, t)

    def _move(self, rows: torch.Tensor, send: np.ndarray, receive: np.ndarray, purpose: str) -> torch.Tensor:
        if len(self.replicas.members) == 1:
            return rows
        moved = exchange_rows(self.replicas.comm, rows.cpu().numpy(), send, receive, self.trace, purpose,
                              self.replicas.members)
        return torch.from_numpy(moved).to(rows.device)


def announce(table: Table, working_set: WorkingSet, replicas: Replicas, trace: Trace) -> PassRows:
    """Tell the homes which rows this rank needs in which step. Collective over the replica.

    This is the only time that keys travel: in a step both sides know what the other needs.
    """
    comm, members = replicas.comm, replicas.members
    homes = len(members)
    counts = exchange_counts(comm, working_set.home_counts)
    asked = exchange_rows(comm, working_set.keys, working_set.home_counts, counts, trace, "plan", members)
    keys, inverse = dedup(asked)
    owner = owners_of(keys, replicas.world.size)
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(keys), np.int32)
    place[order] = np.arange(len(keys), dtype=np.int32)
    slot_of_asked = place[inverse]

    # per pair of ranks one message: for all steps, positions in the block of keys that went to that home
    starts = np.concatenate([[0], np.cumsum(working_set.home_counts)])
    outgoing, outgoing_counts = [], np.zeros(homes, np.int64)
    bounds = [np.concatenate([[0], np.cumsum(c)]) for c in working_set.need_counts]
    for home in range(homes):
        parts = [need[b[home]:b[home + 1]] - starts[home] for need, b in zip(working_set.needs, bounds)]
        outgoing += parts
        outgoing_counts[home] = sum(len(part) for part in parts)
    outgoing = np.concatenate(outgoing).astype(np.int32) if outgoing else np.zeros(0, np.int32)
    steps = len(working_set.needs)
    need_counts = np.ascontiguousarray(working_set.need_counts.T, np.int64)  # [home, step]
    serve_counts = exchange_rows(comm, need_counts, np.ones(homes, np.int64), np.ones(homes, np.int64), trace, "plan",
                                 members)
    received = exchange_rows(comm, outgoing, outgoing_counts, serve_counts.sum(1), trace, "plan", members)
    asked_starts = np.concatenate([[0], np.cumsum(counts)])
    slots, at = [], 0
    for member in range(homes):
        n = int(serve_counts[member].sum())
        slots.append(slot_of_asked[asked_starts[member] + received[at:at + n]])
        at += n
    serve = _by_step(slots, serve_counts, steps)
    home = Home(keys[order], np.bincount(owner, minlength=replicas.world.size).astype(np.int64), serve,
                np.ascontiguousarray(serve_counts.T))
    return PassRows(table, working_set, home, replicas, trace)


def _by_step(slots: list[np.ndarray], counts: np.ndarray, steps: int) -> list[np.ndarray]:
    """From one array a member (all its steps) to one array a step (all members in rank order)."""
    if len(slots) == 1:
        return np.split(slots[0], np.cumsum(counts[0])[:-1]) if steps else []
    ends = np.cumsum(counts, axis=1)
    return [np.concatenate([s[ends[m, step] - counts[m, step]:ends[m, step]] for m, s in enumerate(slots)])
            for step in range(steps)]


def read_or_create(store: TieredStore, table: Table, keys: np.ndarray, seed: int
                   ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows (as the store's layout says) and t uint32 [n] of ``keys`` from the owner's tiers; rows that are not there
    start anew: their places, int64 [m], come third."""
    rows = store.layout.empty(len(keys))
    t = np.zeros(len(keys), np.uint32)
    missing = np.flatnonzero(~store.get(keys, rows, t))
    if len(missing):
        records = store.layout.records(rows)
        if store.layout.lifecycle:
            store.layout.life(rows)[missing] = (0, 0, 0)
        records[missing, :table.width] = init_rows(keys[missing], seed, table.width, table.dim, table.init_scale,
                                                   table.dtype)
        records[missing, table.width:] = 0
        t[missing] = 0
    return rows, t, missing
