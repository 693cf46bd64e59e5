"""The working set of a rank: the distinct keys of a pass, and where each batch finds its values among them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpc_ctr.data.batch import Batch
from hpc_ctr.embedding.table import Table
from hpc_ctr.kernels.dedup import dedup


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


def make_working_set(table: Table, batches: list[Batch], home_of: Callable[[np.ndarray], np.ndarray],
                     homes: int) -> WorkingSet:
    """Dedup the keys of ``batches``; ``home_of(keys)`` gives the number of each key's home, 0 .. homes-1."""
    bags_keys = [table_keys(batch, table) for batch in batches]
    distinct_of = [dedup(keys) for keys, _ in bags_keys]
    merged = np.concatenate([d for d, _ in distinct_of]) if distinct_of else np.zeros(0, np.uint64)
    keys, pass_index = dedup(merged)
    home = home_of(keys)
    order = np.argsort(home, kind="stable")
    position = np.empty(len(keys), np.int32)
    position[order] = np.arange(len(keys), dtype=np.int32)
    needs, bags, counts = [], [], np.zeros((len(batches), homes), np.int64)
    at = 0
    for step, ((distinct, inverse), (_, offsets)) in enumerate(zip(distinct_of, bags_keys)):
        in_pass = pass_index[at:at + len(distinct)]
        at += len(distinct)
        wanted = position[in_pass]
        if homes > 1:
            by_home = np.argsort(home[in_pass], kind="stable")
            place = np.empty(len(distinct), np.int32)
            place[by_home] = np.arange(len(distinct), dtype=np.int32)
            wanted = wanted[by_home]
            inverse = place[inverse]
            counts[step] = np.bincount(home[in_pass], minlength=homes)
        else:
            counts[step, 0] = len(distinct)
        needs.append(wanted)
        bags.append(Bags(np.ascontiguousarray(inverse, np.int32), offsets))
    return WorkingSet(keys[order], np.bincount(home, minlength=homes).astype(np.int64), needs, counts, bags)
