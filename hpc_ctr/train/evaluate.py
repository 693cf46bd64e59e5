"""Evaluation: the mean model over workers and the owners' rows, read without changing anything."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hpc_ctr.comm.exchange import combine, sum_counts
from hpc_ctr.comm.session import together
from hpc_ctr.comm.trace import Trace
from hpc_ctr.data.batch import Batch
from hpc_ctr.embedding.table import Table
from hpc_ctr.embedding.working_set import WorkingSet, make_working_set
from hpc_ctr.exchange.lookup import read_values
from hpc_ctr.metrics.binary import BinaryStats
from hpc_ctr.train.feed import Feed
from hpc_ctr.train.job import Job, default_keys
from hpc_ctr.train.step import forward


def evaluate(job: Job, source: Any) -> BinaryStats:
    """Statistics of the predictions on all of ``source``, over all ranks. Collective; changes no row and no state.

    Must run between passes, when every row is at its owner. Unknown keys read their field's default row.
    """
    stats = BinaryStats()
    feed = Feed(source, 1, job.session.comm, job.tables, job.pass_budget)
    training = job.model.training
    job.model.eval()
    try:
        with job.optimizer.evaluating(), torch.no_grad():
            for logits, batch in predictions(job, feed):
                stats.add(logits, batch.label)
    finally:
        job.model.train(training)
        feed.close()
    return SharedStats().update(stats, job.session.comm, job.trace)


def predictions(job: Job, feed: Feed) -> Iterator[tuple[np.ndarray, Batch]]:
    """Logits [B] for every batch of ``feed``, with the dense parameters that the model has now. Collective."""
    while (work := feed.next_pass(job.config.train.batches_per_pass)) is not None:
        sets, values = [], []
        for table, store in zip(job.tables, job.stores):
            wanted = None
            with together(job.session.comm):
                wanted = make_working_set(table, work.batches, lambda keys: np.zeros(len(keys), np.int64), 1)
            defaults = default_keys(table, job.field_names)
            x = read_values(job.session.comm, table, store, wanted.keys, _fields_of(table, wanted), defaults,
                            job.config.seed, job.trace)
            sets.append(wanted)
            values.append(x)
        for step, batch in enumerate(work.batches):
            if batch.size:
                rows = [torch.from_numpy(x[wanted.needs[step]]).to(job.device) for x, wanted in zip(values, sets)]
                out = forward(job.model, job.tables, batch, rows, [wanted.bags[step] for wanted in sets], job.device,
                              job.dtype, job.autocast)
                yield out.cpu().numpy(), batch


class SharedStats:
    """The statistics of all ranks together, brought up to date by an exchange of what came since the last time."""

    def __init__(self) -> None:
        self.total = BinaryStats()
        self._before = np.zeros_like(self.total.counts)  # this rank's, as they are in the total

    def update(self, mine: BinaryStats, comm: Any, trace: Trace) -> BinaryStats:
        """``mine`` of all ranks together, on every rank, valid until the next call. Collective."""
        new = sum_counts(comm, (mine.counts - self._before).reshape(-1), trace, "metrics")
        self._before[:] = mine.counts
        self.total.counts += new.reshape(self.total.counts.shape)
        sums = combine(comm, np.array([mine.loss_sum, mine.prediction_sum]), "SUM", trace, "metrics")
        self.total.loss_sum, self.total.prediction_sum = map(float, sums)
        return self.total


def _fields_of(table: Table, wanted: WorkingSet) -> np.ndarray:
    """For every key of the working set, the place in the table of the field that it belongs to: int64 [n].

    A key is salted with its field, so it belongs to one.
    """
    out = np.zeros(len(wanted.keys), np.int64)
    for need, bags in zip(wanted.needs, wanted.bags):
        batch = (len(bags.offsets) - 1) // len(table.fields)
        ends = bags.offsets[::batch] if batch else np.zeros(len(table.fields) + 1, np.int64)
        out[need[bags.index]] = np.repeat(np.arange(len(table.fields)), np.diff(ends))
    return out
