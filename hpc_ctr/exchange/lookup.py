"""Reading rows without changing anything: what evaluation and prediction use."""

from typing import Any

import numpy as np

from hpc_ctr.comm.exchange import exchange_counts, exchange_rows
from hpc_ctr.comm.trace import Trace
from hpc_ctr.embedding.init import init_rows
from hpc_ctr.embedding.table import Table
from hpc_ctr.exchange.replicas import owners_of
from hpc_ctr.storage.tiered import TieredStore


def read_values(comm: Any, table: Table, store: TieredStore, keys: np.ndarray, default_index: np.ndarray,
                default_keys: np.ndarray, seed: int, trace: Trace) -> np.ndarray:
    """x [n, width] of ``keys`` uint64 [n] from their owners. Collective; creates no row.

    A key without a row reads the default row of its field: default_index int64 [n] points into default_keys
    uint64 [F]. A default row that was never trained has its initial value.
    """
    wanted = np.concatenate([keys, default_keys])
    owner = owners_of(wanted, comm.size)
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=comm.size).astype(np.int64)
    counts_in = exchange_counts(comm, counts)
    asked = exchange_rows(comm, wanted[order], counts, counts_in, trace, "lookup")
    distinct, inverse = np.unique(asked, return_inverse=True)
    rows = store.layout.empty(len(distinct))
    rows[:] = 0  # what is not found travels as well
    found = store.get(distinct, rows, np.zeros(len(distinct), np.uint32))
    answers = (np.ascontiguousarray(store.layout.records(rows)[inverse, :table.width]), found[inverse].astype(np.uint8))
    x_back, found_back = (exchange_rows(comm, a, counts_in, counts, trace, "lookup") for a in answers)
    x = np.empty((len(wanted), table.width), table.dtype)
    known = np.empty(len(wanted), bool)
    x[order], known[order] = x_back, found_back.astype(bool)
    n = len(keys)
    defaults = x[n:]
    new = ~known[n:]
    defaults[new] = init_rows(default_keys[new], seed, table.width, table.dim, table.init_scale, table.dtype)
    unknown = ~known[:n]
    x[:n][unknown] = defaults[default_index[unknown]]
    return x[:n]
