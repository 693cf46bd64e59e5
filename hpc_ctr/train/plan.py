"""The memory plan: how storage.host_budget is shared between passes and tiers. Made before anything is allocated."""

from dataclasses import dataclass
from typing import Any

from hpc_ctr.cluster.memory import memory
from hpc_ctr.embedding.table import Table
from hpc_ctr.errors import UsageError
from hpc_ctr.storage.host_cache import FLOOR_ROWS
from hpc_ctr.storage.tiered import budget_for
from hpc_ctr.units import format_bytes, parse_bytes

# Rows of a pass live outside the cache while it runs; the rest of the budget is for the tiers (docs/architecture.md).
PASS_SHARE = 0.25
PASSES_IN_FLIGHT = 2  # one trains, the next one's batches, lists and cold rows are there already
AUTO_SHARE = 0.5


@dataclass(frozen=True)
class PassBudget:
    """Host memory that a pass may take on a rank, and what things cost."""

    bytes: int
    several_replicas: bool

    def row_bytes(self, table: Table) -> int:
        """Host memory of one row of the working set: device table, key lists, and the owner's copy while it moves."""
        record = table.floats * table.dtype.itemsize + 4
        lists = 8 + 8 + 4 + 4 + 8  # keys at home and owner, scratch, dedup tables
        if table.lifecycle:  # the row as the store has it, keys, shows, clicks and field here and at the owner
            lists += table.layout.words * 4 + 2 * 32 + 8
        return record * (3 if self.several_replicas else 1) + lists

    def bytes_of(self, table: Table, new_rows: int, distinct: int, nnz: int) -> int:
        """Cost of one more batch with ``distinct`` rows, ``new_rows`` of them new to the pass."""
        return new_rows * self.row_bytes(table) + distinct * 8 + nnz * 4


@dataclass(frozen=True)
class Plan:
    """One rank's share of memory, in bytes."""

    host_budget: int
    passes: int
    tiers: dict[str, int]
    filters: dict[str, int]

    def lines(self) -> list[str]:
        """The plan for people."""
        out = [f"host budget of a rank: {format_bytes(self.host_budget)} (storage.host_budget)",
               f"  passes, the one that trains and the next (device tables in host memory, position lists, batches, rows "
               f"read ahead): {format_bytes(self.passes)}"]
        out += [f"  show counters of table {name} (lifecycle.count_filter_bytes): {format_bytes(share)}"
                for name, share in self.filters.items() if share]
        return out + [f"  tiers of table {name} (host cache and the cold store's index): {format_bytes(share)}"
                      for name, share in self.tiers.items()]


def make_plan(host_budget: str | int, tables: list[Table], ranks_on_node: int, ranks: int) -> Plan:
    """Divide the budget. ``auto`` is half of the memory that is available now, by the ranks of the node; ranks: of the
    job.

    Raises UsageError when it is too little to start with.
    """
    budget = host_budget_bytes(host_budget, ranks_on_node)
    passes = int(budget * PASS_SHARE)
    weights = [table.floats * len(table.fields) for table in tables]
    # ranks differ in their number of shards by one at most; the first has the most
    filters = {table.name: table.lifecycle.filter_bytes(0, ranks) if table.lifecycle else 0 for table in tables}
    rest = budget - passes - sum(filters.values())
    if rest <= 0:
        raise UsageError(f"storage.host_budget: {format_bytes(budget)} does not hold the show counters, "
                         f"{format_bytes(sum(filters.values()))} on a rank; raise it, or lower "
                         "lifecycle.count_filter_bytes")
    tiers = {table.name: int(rest * weight / sum(weights)) for table, weight in zip(tables, weights)}
    for table in tables:
        need = budget_for(table.layout, FLOOR_ROWS, 0)
        if tiers[table.name] < need:
            raise UsageError(f"storage.host_budget: {format_bytes(budget)} leaves {format_bytes(tiers[table.name])} for "
                             f"the tiers of table {table.name!r}, and the smallest cache takes {format_bytes(need)}; "
                             "raise storage.host_budget")
    return Plan(budget, passes, tiers, filters)


def host_budget_bytes(host_budget: str | int, ranks_on_node: int) -> int:
    """storage.host_budget in bytes. Raises UsageError."""
    if host_budget == "auto":
        return int(memory().available * AUTO_SHARE / ranks_on_node)
    return parse_bytes(host_budget, "storage.host_budget")


def plan_lines(config: Any, ranks_on_node: int) -> tuple[list[str], list[str]]:
    """For ``doctor``: the plan of a job as lines, and the problems it has. Allocates nothing."""
    from hpc_ctr.data.source import field_names
    from hpc_ctr.embedding.table import make_tables
    from hpc_ctr.models import needs_first_order, wants_vectors

    problems = []
    names = field_names(config.data)
    tables = make_tables(config.embedding, names, needs_first_order(config.model.name),
                         wants_vectors(config.model.name), config.lifecycle)
    plan = make_plan(config.storage.host_budget, tables, ranks_on_node, ranks_on_node)
    lines = plan.lines()
    budget = PassBudget(plan.passes // PASSES_IN_FLIGHT, False)
    for table in tables:
        row = table.floats * table.dtype.itemsize
        lines.append(f"  table {table.name}: {len(table.fields)} fields, dim {table.dim}, {table.optimizer}, "
                     f"{row} bytes a record; a pass holds up to {budget.bytes // budget.row_bytes(table):,} rows")
        lines.append(f"  disk: {format_bytes(1e6 * table.layout.stored_bytes)} a million rows of table {table.name} in "
                     "the cold store, twice that while segments are compacted, and once more for what checkpoints keep")
    available = memory().available
    if plan.host_budget * ranks_on_node > available:
        problems.append(f"storage.host_budget: {ranks_on_node} ranks of this node would take "
                        f"{format_bytes(plan.host_budget * ranks_on_node)} but {format_bytes(available)} is available; "
                        "lower it or start fewer ranks a node")
    return lines, problems


def check_pass_budget(needed: int, budget: PassBudget, what: str) -> None:
    """Raises UsageError when a pass of one step needs more than there is."""
    if needed > budget.bytes:
        raise UsageError(f"storage.host_budget: not even one batch fits: {what} needs {format_bytes(needed)} and a pass "
                         f"may take {format_bytes(budget.bytes)} of it; raise storage.host_budget or lower "
                         "data.batch_size")
