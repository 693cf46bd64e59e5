"""The training loop."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpc_ctr.comm.session import together
from hpc_ctr.comm.trace import Trace
from hpc_ctr.embedding.working_set import collect_keys, count_shows, place_keys
from hpc_ctr.errors import DataError
from hpc_ctr.exchange.pass_rows import PassRows, announce
from hpc_ctr.metrics.binary import BinaryStats
from hpc_ctr.train.feed import Feed, Pass
from hpc_ctr.train.job import Job
from hpc_ctr.train.plan import check_pass_budget
from hpc_ctr.train.step import train_step


@dataclass
class Progress:
    """Where training stands on this rank; all of it is in a checkpoint.

    step: global steps done; window: steps since the last merge of rows; stats: predictions made while training.
    """

    step: int = 0
    passes: int = 0
    samples: int = 0  # over all ranks
    last_row_merge: int = 0
    stats: BinaryStats = field(default_factory=BinaryStats)


@dataclass
class PassReport:
    """What a pass did, over all ranks, in the hands of every rank.

    loss_sums float64 [steps] and samples int64 [steps]: per step, over the samples of all ranks. period: what the
    lifecycle decided, on this rank, where a period ended with the pass.
    """

    first_step: int
    loss_sums: np.ndarray
    samples: np.ndarray
    seconds: float
    train_seconds: float
    interrupted: bool
    period: dict[str, dict[str, int]] | None = None  # by table, of this rank: see end_period


def run(job: Job, feed: Feed, progress: Progress, each_pass: Callable[[PassReport], None],
        each_step: Callable[[int, float], None] | None = None) -> bool:
    """Train until the data or ``train.max_steps`` ends, or a signal asks to stop. Collective.

    ``each_pass`` is called on every rank after each pass, when all rows are back at their owners: it may evaluate and
    save. Returns True when training is done, False when it was interrupted by SIGUSR1 or SIGTERM.
    """
    k_rows = job.config.rows.k_rows
    with _flag_on_signal() as asked_to_stop:
        following = plan_pass(job, feed, progress.step, progress.samples)
        while following is not None:
            begin = time.perf_counter()
            work, tables = open_pass(job, following)
            # known a pass ahead: cold rows of the next one are read from disk while this one trains
            after = progress.step + work.steps, progress.samples + int(work.samples.sum())
            ahead = not period_ends(job, progress.samples, after[1])
            following = plan_pass(job, feed, *after) if ahead else None
            loss_sums = np.zeros(work.steps)
            started = time.perf_counter()
            for step in range(work.steps):
                batch, samples = work.batches[step], work.samples[step]
                logits, loss = train_step(job.model, job.optimizer, tables, batch, samples, step, job.device, job.dtype,
                                          job.autocast)
                progress.step += 1
                if batch.size:
                    loss_sums[step] = loss * batch.size
                    if np.isfinite(loss):  # else _report stops the job, on all ranks
                        progress.stats.add(logits, batch.label)
                if progress.step % k_rows == 0 and step + 1 < work.steps:
                    merge_rows(job, tables, progress)
                if each_step:
                    each_step(progress.step, loss)
            merge_rows(job, tables, progress, last=True)
            train_seconds = time.perf_counter() - started
            close_pass(job, tables)
            feed.trained(work)
            progress.passes += 1
            samples_before = progress.samples
            report = _report(job, work, loss_sums, progress, begin, train_seconds, asked_to_stop())
            report.period = end_period(job, samples_before, progress.samples)
            each_pass(report)
            if report.interrupted:
                return False
            if not ahead:  # what the lifecycle decided says which keys have rows now
                following = plan_pass(job, feed, progress.step, progress.samples)
    job.optimizer.finish()
    return True


def pass_limit(job: Job, step: int, samples: int) -> int:
    """Steps that a pass after global step ``step`` and ``samples`` samples may have: it ends where a period of the
    lifecycle ends, and with several replicas where rows merge anyway."""
    limit = job.config.train.batches_per_pass
    k_rows = job.config.rows.k_rows
    if job.replicas.several:
        limit = max(k_rows, limit // k_rows * k_rows) - step % k_rows
    if every := job.config.lifecycle.every:
        # no batch is larger than batch_size, so a pass never goes on after the step with which a period ends
        largest = job.config.data.batch_size * job.session.size
        until = -(-(every - samples % every) // largest)
        if job.replicas.several:
            until += -(step + until) % k_rows
        limit = min(limit, until)
    max_steps = job.config.train.max_steps
    return min(limit, max_steps - step) if max_steps else limit


@dataclass
class Planned:
    """A pass that is agreed on and not begun: its batches, who needs which rows, and what it took to tell the homes."""

    work: Pass
    tables: list[PassRows]
    trace: Trace


def plan_pass(job: Job, feed: Feed, step: int, samples: int) -> Planned | None:
    """Take the next batches, after global step ``step`` and ``samples`` samples, tell homes and owners what they need,
    and let the tiers get ready for it; None when there are no more. Collective, and pure: nothing is counted or changed
    but the order of work. """
    limit = pass_limit(job, step, samples)
    while limit > 0:
        before = feed.position
        work = feed.next_pass(limit)
        if work is None:
            break
        trace = job.trace.ahead()
        tables = [_announce(job, number, work, samples, trace) for number in range(len(job.tables))]
        if _fits(job, work, tables):
            for rows, store in zip(tables, job.stores):
                rows.ask()
                store.stage(rows.owned.keys, job.pass_budget.bytes // store.layout.stored_bytes)
            return Planned(work, tables, trace)
        feed.put_back(before)  # the homes' shares are larger than this rank's own keys let expect
        limit = work.steps // 2
    return None


def open_pass(job: Job, planned: Planned) -> tuple[Pass, list[PassRows]]:
    """Begin a pass: bring its rows to their homes. Collective."""
    job.trace.take(planned.trace)
    for rows, store in zip(planned.tables, job.stores):
        rows.trace = job.trace
        rows.pull(store, job.config.seed, job.device)
        store.unstage()
    return planned.work, planned.tables


def _announce(job: Job, number: int, work: Pass, samples: int, trace: Trace) -> PassRows:
    """Announce what this rank needs of table ``number`` in a pass; keys that have to wait for a row of their own need
    their field's default row. Collective."""
    comm, table, lifecycle = job.session.comm, job.tables[number], job.lifecycles[number]
    keys = shows = seen = wanted = None
    with together(comm):
        keys = collect_keys(table, work.batches)
        if lifecycle:
            shows = count_shows(keys, work.batches)
    if lifecycle:
        keys, seen = lifecycle.meet(comm, job.stores[number], keys, shows, samples, trace)
    with together(comm):
        wanted = place_keys(keys, job.replicas.homes_of, len(job.replicas.members))
    rows = announce(table, wanted, job.replicas, trace)
    rows.lifecycle, rows.seen = lifecycle, seen
    return rows


def period_ends(job: Job, before: int, after: int) -> bool:
    """Whether a period of the lifecycle ends between these sample counts."""
    every = job.config.lifecycle.every
    return bool(every) and before // every != after // every


def end_period(job: Job, before: int, after: int) -> dict[str, dict[str, int]] | None:
    """Let the lifecycle decide, where a period ended between the sample counts ``before`` and ``after``; returns this
    rank's counts by table then, else None. Collective."""
    if not period_ends(job, before, after):
        return None
    every, facts = job.config.lifecycle.every, {}
    with together(job.session.comm):
        for table, lifecycle, store in zip(job.tables, job.lifecycles, job.stores):
            facts[table.name] = lifecycle.end_period(store, before // every * every, after // every * every)
    return facts


def merge_rows(job: Job, tables: list[PassRows], progress: Progress, last: bool = False) -> None:
    """Merge shared rows between replicas, if any step was taken since the last merge; ``last``: of the pass. Collective.
    """
    window = progress.step - progress.last_row_merge
    if window and job.replicas.several:
        begin = time.perf_counter()
        for rows in tables:
            rows.merge(window, job.config.rows.rule, job.config.rows.window, last)
        job.row_merge_seconds += time.perf_counter() - begin
    progress.last_row_merge = progress.step


def close_pass(job: Job, tables: list[PassRows]) -> None:
    """Bring all rows back to their owners' tiers. Collective."""
    for rows, store in zip(tables, job.stores):
        rows.push(store)


def _fits(job: Job, work: Pass, tables: list[PassRows]) -> bool:
    """Whether every home's share of the working set is within the budget of passes. Collective."""
    needed = sum(batch.nbytes for batch in work.batches)
    for rows in tables:
        needed += job.pass_budget.bytes_of(rows.table, len(rows.home.keys), sum(len(s) for s in rows.home.serve),
                                           sum(len(batch.keys) for batch in work.batches))
    largest = max(job.session.comm.allgather(needed))
    if work.steps == 1:
        check_pass_budget(largest, job.pass_budget, "the rows of one step at their home rank")
    return largest <= job.pass_budget.bytes


def _report(job: Job, work: Pass, loss_sums: np.ndarray, progress: Progress, begin: float, train_seconds: float,
            stop: bool) -> PassReport:
    """Sum the pass over ranks, in rank order; stop the job when a loss is not a number. Collective."""
    comm = job.session.comm
    everyone = np.empty((comm.size, work.steps + 1))
    comm.Allgather(np.append(loss_sums, float(stop)), everyone)
    first = progress.step - work.steps
    bad = np.argwhere(~np.isfinite(everyone[:, :-1]))
    if len(bad):
        rank, step = bad[np.argmin(bad[:, 1])]
        raise DataError(f"the loss is not finite at step {first + step + 1} on rank {rank}; lower dense.lr or "
                        "embedding.lr, or look for extreme values in the dense columns")
    totals = work.samples.sum(1)
    progress.samples += int(totals.sum())
    sums = np.zeros(work.steps)
    for row in everyone[:, :-1]:
        sums += row
    return PassReport(first, sums, totals, time.perf_counter() - begin, train_seconds, bool(everyone[:, -1].any()))


class _flag_on_signal:
    """While active, SIGUSR1 and SIGTERM only set a flag: ranks compare it at the end of a pass and stop together."""

    def __enter__(self) -> Callable[[], bool]:
        self._set = False
        self._before = {}
        for number in (signal.SIGUSR1, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not in the main thread: an embedding program keeps its own handlers
                break
        return lambda: self._set

    def _on_signal(self, *_: Any) -> None:
        self._set = True

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
