"""The working set of a rank: the distinct keys of a pass, and where each batch finds its values among them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpc_ctr.data.batch import Batch
from hpc_ctr.embedding.table import Table
from hpc_ctr.kernels.dedup import dedup
from hpc_ctr.kernels.shows import tally


@dataclass(frozen=True)
class Bags:
    """One batch's bags of one table: index int32 [nnz] into the batch's distinct values, offsets int64 [F*B+1]."""

    index: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class WorkingSet:
    """What one rank needs of one table in one pass.

    keys: uint64 [n], distinct, grouped by home; home_counts int64 [R] says how many each home holds.
    needs: for each step, int32 positions in ``keys`` of the batch's distinct rows, grouped by home.
    need_counts: int64 [steps, R]. bags: one Bags a step, pointing into that step's ``needs`` order.
    """

    keys: np.ndarray
    home_counts: np.ndarray
    needs: list[np.ndarray]
    need_counts: np.ndarray
    bags: list[Bags]


def table_keys(batch: Batch, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Keys uint64 [nnz_t] of the table's fields in a batch, and their offsets int64 [F_t*B+1]."""
    size, fields = batch.size, table.fields
    if len(fields) * size + 1 == len(batch.offsets):
        return batch.keys, batch.offsets
    keys, lengths = [], []
    for f in fields:
        bounds = batch.offsets[f * size:(f + 1) * size + 1] if size else batch.offsets[:1]
        keys.append(batch.keys[bounds[0]:bounds[-1]])
        lengths.append(np.diff(bounds))
    offsets = np.zeros(len(fields) * size + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return np.concatenate(keys), offsets


@dataclass(frozen=True)
class PassKeys:
    """The distinct keys of a pass of one table, keys uint64 [n], and how each batch refers to them.

    at: for each step, int32 [u] positions in ``keys`` of the batch's distinct keys. bags: one Bags a step, pointing
    into that step's ``at``.
    """

    keys: np.ndarray
    at: list[np.ndarray]
    bags: list[Bags]

    def replaced(self, keys: np.ndarray) -> "PassKeys":
        """The same bags with ``keys`` uint64 [n], which may be equal, instead of ``self.keys``."""
        distinct, index = dedup(keys)
        at, bags = [], []
        for own, bag in zip(self.at, self.bags):
            mine, inverse = dedup(index[own].astype(np.uint64))
            at.append(mine.astype(np.int32))
            bags.append(Bags(inverse[bag.index], bag.offsets))
        return PassKeys(distinct, at, bags)


@dataclass(frozen=True)
class Shows:
    """How often each key of a pass was shown, and in samples that were clicked: int64 [n]; field: its place in the
    table's fields, int64 [n]."""

    shows: np.ndarray
    clicks: np.ndarray
    field: np.ndarray


def collect_keys(table: Table, batches: list[Batch]) -> PassKeys:
    """Dedup the keys of ``batches``."""
    bags_keys = [table_keys(batch, table) for batch in batches]
    distinct_of = [dedup(keys) for keys, _ in bags_keys]
    merged = np.concatenate([d for d, _ in distinct_of]) if distinct_of else np.zeros(0, np.uint64)
    keys, pass_index = dedup(merged)
    ends = np.cumsum([len(distinct) for distinct, _ in distinct_of])
    at = np.split(pass_index, ends[:-1]) if distinct_of else []
    return PassKeys(keys, at, [Bags(inverse, offsets)
                               for (_, inverse), (_, offsets) in zip(distinct_of, bags_keys)])


def count_shows(keys: PassKeys, batches: list[Batch]) -> Shows:
    """Occurrences of each key in the bags of the batches from which ``collect_keys`` made ``keys``."""
    out = Shows(*(np.zeros(len(keys.keys), np.int64) for _ in range(3)))
    for at, bags, batch in zip(keys.at, keys.bags, batches):
        if batch.size:
            tally(at, bags.index, bags.offsets, batch.label, out.shows, out.clicks, out.field)
    return out


def place_keys(wanted: PassKeys, home_of: Callable[[np.ndarray], np.ndarray], homes: int) -> WorkingSet:
    """Group the keys by home; ``home_of(keys)`` gives the number of each key's home, 0 .. homes-1."""
    keys = wanted.keys
    home = home_of(keys)
    order = np.argsort(home, kind="stable")
    position = np.empty(len(keys), np.int32)
    position[order] = np.arange(len(keys), dtype=np.int32)
    needs, bags, counts = [], [], np.zeros((len(wanted.at), homes), np.int64)
    for step, (in_pass, bag) in enumerate(zip(wanted.at, wanted.bags)):
        needed, inverse = position[in_pass], bag.index
        if homes > 1:
            by_home = np.argsort(home[in_pass], kind="stable")
            place = np.empty(len(in_pass), np.int32)
            place[by_home] = np.arange(len(in_pass), dtype=np.int32)
            needed = needed[by_home]
            inverse = place[inverse]
            counts[step] = np.bincount(home[in_pass], minlength=homes)
        else:
            counts[step, 0] = len(in_pass)
        needs.append(needed)
        bags.append(Bags(np.ascontiguousarray(inverse, np.int32), bag.offsets))
    return WorkingSet(keys[order], np.bincount(home, minlength=homes).astype(np.int64), needs, counts, bags)


def make_working_set(table: Table, batches: list[Batch], home_of: Callable[[np.ndarray], np.ndarray],
                     homes: int) -> WorkingSet:
    """Dedup the keys of ``batches`` and group them by home (see ``place_keys``)."""
    return place_keys(collect_keys(table, batches), home_of, homes)
