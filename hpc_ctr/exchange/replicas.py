"""Who owns a row, which ranks form a replica, and which of them is a row's home."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_ctr.comm.session import Session
from hpc_ctr.errors import UsageError
from hpc_ctr.kernels.merge import RULES

SHARDS = 1024
KINDS = ("auto", "world", "node", "rank")
WINDOWS = ("full", "x")


@dataclass
class RowsOptions:
    """How the rows of a pass are held and kept together.

    replica: world = one synchronous copy over all ranks; node = one a host; rank = one a rank; auto = world on one
    host, node on several.
    """

    replica: str = "auto"
    k_rows: int = 20  # steps between merges of rows that several replicas hold
    window: str = "full"  # what such a merge inside a pass moves: full = x and state; x = x alone, state at its end
    rule: str = "mass"  # mass | mean | mean_all | sum (all but mass are there for comparison)

    def check(self) -> None:
        """Raises UsageError naming the setting."""
        if self.replica not in KINDS:
            raise UsageError(f"rows.replica: {self.replica!r} is not one of {', '.join(KINDS)}")
        if self.k_rows < 1:
            raise UsageError(f"rows.k_rows: must be at least 1, not {self.k_rows}")
        if self.window not in WINDOWS:
            raise UsageError(f"rows.window: {self.window!r} is not one of {', '.join(WINDOWS)}")
        if self.rule not in RULES:
            raise UsageError(f"rows.rule: {self.rule!r} is not one of {', '.join(RULES)}")


def owners_of(keys: np.ndarray, ranks: int) -> np.ndarray:
    """Rank int64 [n] that keeps each key's row between passes: 1024 shards by the key's high bits, dealt evenly."""
    shard = (keys >> np.uint64(54)).astype(np.int64)
    return (shard * ranks) >> 10


def keys_of_owner(rank: int, ranks: int) -> tuple[int, int]:
    """First and last key that ``rank`` owns: its shards, and so its keys, are one range."""
    first, behind = (-(-at * SHARDS // ranks) for at in (rank, rank + 1))
    return first << 54, (behind << 54) - 1


@dataclass(frozen=True)
class Replicas:
    """The partition of the ranks into replicas, seen from one rank.

    groups: world ranks of every replica. mine: the number of this rank's replica; comm: its communicator, ranks in
    the order of the group. local[r]: place of world rank r in its own group.
    """

    world: Any
    groups: list[list[int]]
    mine: int
    comm: Any
    local: np.ndarray

    @property
    def members(self) -> list[int]:
        """World ranks of this rank's replica."""
        return self.groups[self.mine]

    @property
    def several(self) -> bool:
        """True when rows can differ between replicas."""
        return len(self.groups) > 1

    def homes_of(self, keys: np.ndarray) -> np.ndarray:
        """Place int64 [n] in this replica's group of the rank that holds each key in a pass.

        A row's home has the local index of its owner, modulo the replica's size, so that between nodes ranks of
        equal index talk to each other.
        """
        return self.local[owners_of(keys, self.world.size)] % len(self.members)


def make_replicas(session: Session, kind: str) -> Replicas:
    """Form the replicas. Collective. Raises UsageError for an unknown kind."""
    if session.size > SHARDS:
        raise UsageError(f"the job has {session.size} ranks, but rows are dealt over {SHARDS} shards; "
                         f"start at most {SHARDS} ranks")
    if kind == "auto":
        kind = "world" if len(session.nodes) == 1 else "node"
    groups = {"world": lambda: [list(range(session.size))], "node": lambda: session.nodes,
              "rank": lambda: [[rank] for rank in range(session.size)]}[kind]()
    mine = next(i for i, group in enumerate(groups) if session.rank in group)
    local = np.zeros(session.size, np.int64)
    for group in groups:
        local[group] = np.arange(len(group))
    return Replicas(session.comm, groups, mine, session.comm.Split(mine, session.rank), local)
