"""What the commands do, as functions: train and evaluate. Everything here is collective over the session."""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_ctr import config as job_file
from hpc_ctr.checkpoint import load as checkpoint_load
from hpc_ctr.checkpoint import save as checkpoint_save
from hpc_ctr.checkpoint.state import Manifest, complete, find, read_manifest
from hpc_ctr.cluster.launch import start_job
from hpc_ctr.comm import session as mpi
from hpc_ctr.config import Config
from hpc_ctr.data.badrows import BadRows
from hpc_ctr.data.batch import Batch
from hpc_ctr.data.batch_list import BatchList
from hpc_ctr.data.order import OrderState
from hpc_ctr.data.source import open_source
from hpc_ctr.errors import EXIT_DONE, EXIT_REQUEUE, DataError, UsageError
from hpc_ctr.metrics.binary import BinaryStats
from hpc_ctr.report.run_folder import FolderLock, MetricsLog, RunFolder, earlier_checkpoint_dir, write_summary
from hpc_ctr.report.trace_log import TraceLog
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.train.evaluate import SharedStats
from hpc_ctr.train.evaluate import evaluate as evaluate_job
from hpc_ctr.train.feed import Feed
from hpc_ctr.train.job import Job, default_store_dir, make_outside, peak_rss_bytes, rng_state, set_rng_state
from hpc_ctr.train.loop import PassReport, Progress, run
from hpc_ctr.train.progress import Bar, ProgressLine


def train(config: Config, resume: str = "", session: mpi.Session | None = None) -> int:
    """Train as ``config`` says and leave a run folder; returns the exit code (0 done, 75 interrupted by a signal).

    resume: "" starts anew; "auto" continues from the last complete checkpoint of the run, if there is one; else the
    path of a checkpoint or run folder to continue from.
    """
    session = session or start_job()
    comm = session.comm
    run_dir = Path(config.run_dir)
    root = Path(config.checkpoint.dir) if config.checkpoint.dir else run_dir / "checkpoints"
    start: tuple[Path, Manifest] | None = None
    with mpi.together(comm):
        start = _find_start(root, resume)
    source = open_source(config.data, config.seed, comm, "train")
    test = open_source(config.data, config.seed, comm, "test") if config.data.split.by != "none" else None
    store_dir = default_store_dir(config) / f"rank-{session.rank:04d}"
    with ExitStack() as held:
        folder = None
        with mpi.together(comm):
            if session.is_root:
                folder = _hold_folders(held, config, root, start, resume)
        job = held.enter_context(Job(config, session, source.num_dense, [f.name for f in source.fields], store_dir))
        with mpi.together(comm):
            if start:
                checkpoint_load.check_tables(start[1], job.tables)
            elif folder:
                folder.clear()
        line = held.enter_context(ProgressLine(session.is_root))
        run_ = _Run(job, source, test, root, folder, line)
        held.callback(run_.close)
        return run_.go(start)


def evaluate(where: str, overrides: dict[str, str], session: mpi.Session | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint (its folder, or a run folder: the last one) on the job's test data, on any rank count.

    Returns the metrics: samples, clicks, auc, logloss, calibration, on every rank.
    """
    session = session or start_job()
    comm = session.comm
    folder = config = manifest = None
    with mpi.together(comm):
        folder = find(where)
        manifest = read_manifest(folder)
        config = job_file.load(_config_of(folder, where), overrides)
    test = open_source(config.data, config.seed, comm, "test")
    with mpi.together(comm):
        if config.data.split.by == "none":
            raise UsageError("data.split: by is none, so there is no test part to evaluate on; "
                             "give --data.split.by hash, or files with --data.test_files")
    with ExitStack() as held:
        scratch = ""
        with mpi.together(comm):
            place = make_outside(config)
            scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="hpc_ctr-evaluate-", dir=place))
        job = held.enter_context(Job(config, session, test.num_dense, [f.name for f in test.fields], Path(scratch)))
        with Bar("reading rows", session.is_root) as bar:
            _restore(job, folder, manifest, resume_training=False, progress=bar.update)
        stats = evaluate_job(job, test)
    if not stats.samples:
        raise DataError("the test part holds no row, so there is nothing to evaluate on; look at data.split and "
                        "data.test_files")
    return stats.summary()


def train_batches(config: dict[str, Any], batches: list[Batch], num_dense: int, fields: list[Any],
                  comm: Any = None) -> "TrainResult":
    """Train on batches that are in memory, this rank's own; no run folder, no checkpoint. For tests and experiments.

    config: nested dicts as in a job file, without data. comm: an mpi4py communicator; None takes COMM_WORLD.
    """
    built = job_file.from_dict({**config, "data": {"files": ["in-memory"]}})
    session = mpi.start() if comm is None else mpi.Session(comm, comm.rank, comm.size)
    if built.lifecycle.every:  # passes must not go beyond the end of a period
        built.data.batch_size = max(session.comm.allgather(max([1, *(batch.size for batch in batches)])))
    source = BatchList(batches, num_dense, fields)
    result = TrainResult()
    with tempfile.TemporaryDirectory(prefix="hpc_ctr-") as scratch:
        with Job(built, session, num_dense, [f.name for f in fields], Path(scratch)) as job:
            job.open_stores()
            feed = Feed(source, 1, session.comm, job.tables, job.pass_budget)

            def each_pass(report: PassReport) -> None:
                result.pass_ends.append(report.first_step + len(report.samples))
                result.periods += [report.period] if report.period is not None else []

            run(job, feed, Progress(), each_pass, lambda step, loss: result.losses.append(loss))
            result.dense = job.optimizer.worker_state()
            result.merges = job.optimizer.merges
            result.bytes = job.bytes_so_far()
            result.tiers = job.tier_counters()
            result.tables = [list(store.iterate(4096)) for store in job.stores]
            result.layouts = [store.layout for store in job.stores]
    return result


class TrainResult:
    """What ``train_batches`` leaves on this rank: losses (one a step, NaN without samples), dense (worker_state),
    pass_ends (global steps), periods (what the lifecycle decided at the end of each), merges, bytes, tiers, tables (rows
    that this rank owns, by table) and their layouts."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.pass_ends: list[int] = []
        self.dense: dict[str, np.ndarray] = {}
        self.merges = 0
        self.bytes: dict[str, dict[str, int]] = {}
        self.tiers: dict[str, int] = {}
        self.tables: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        self.layouts: list[RecordLayout] = []
        self.periods: list[dict[str, dict[str, int]]] = []

    def rows(self, table: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """keys uint64 [n], records [n, floats], t uint32 [n] of the rows of a table that this rank owns."""
        parts = self.tables[table]
        if not parts:
            return np.zeros(0, np.uint64), np.zeros((0, 0)), np.zeros(0, np.uint32)
        keys, rows, t = (np.concatenate(column) for column in zip(*parts))
        return keys, self.layouts[table].records(rows), t

    def life(self, table: int = 0) -> np.ndarray:
        """The lifecycle LIFE [n] of the same rows, of a table that has one."""
        layout = self.layouts[table]
        return layout.life(np.concatenate([rows for _, rows, _ in self.tables[table]] or [layout.empty(0)]))


class _Run:
    """One training run: the loop with its metrics, checkpoints and summary around it."""

    def __init__(self, job: Job, source: Any, test: Any, root: Path, folder: RunFolder | None, line: ProgressLine):
        self.job = job
        self.config = job.config
        self.source = source
        self.test = test
        self.root = root
        self.folder = folder  # on rank 0
        self.log: MetricsLog | None = None
        self.line = line
        self.progress = Progress()
        self.stats = SharedStats()
        self.seconds = 0.0
        self._told_bad_rows = False
        self._bytes_before: dict[str, dict[str, int]] = {}  # of the run up to the checkpoint that it continues
        self._tiers_before: dict[str, int] = {}
        self._exchanges_before: dict[str, dict[str, float]] = {}
        self.trace_log: TraceLog | None = None
        self._window = [0.0, 0, 0]  # loss sum, samples, first step of the metrics line that is being filled

    def go(self, start: tuple[Path, Manifest] | None) -> int:
        job, comm = self.job, self.job.session.comm
        epoch, state = 0, None
        if start:
            folder, manifest = start
            if self._is_finished(manifest):
                self.line.say(f"{folder}: this run is finished; there is nothing to continue")
                return EXIT_DONE
            epoch, state = self._load(folder, manifest)
            self.line.say(f"continuing from {folder} (step {manifest.step:,})")
        else:
            job.optimizer.check_same_start()
            job.open_stores()
        if job.mergers.between.note:
            self.line.say(job.mergers.between.note)
        feed = Feed(self.source, self.config.data.epochs, comm, job.tables, job.pass_budget, epoch, state)
        self.feed = feed
        try:
            with mpi.together(comm):
                self._begin(start)  # all checks are behind us: from here on the folder is that of this job
            done = run(job, feed, self.progress, self._each_pass, self.line.step)
        finally:
            feed.close()
        self._flush_window()
        if not self.progress.samples:
            read = feed.bad_rows().total
            raise DataError(f"there was no row to train on: {read:,} rows were read, and all of them are bad or in the "
                            "test part; look at data.files and data.split")
        if not done:
            self._save(finished=False)
            self.line.say("stopped by a signal; a checkpoint is written: continue with --resume auto")
            return EXIT_REQUEUE
        self._save(finished=True)
        result = self._evaluate() if self.test is not None else None
        self._summarise(result)
        job.drop_stores()
        return EXIT_DONE

    def _begin(self, start: tuple[Path, Manifest] | None) -> None:
        if self.folder:
            self.folder.begin(job_file.to_dict(self.config))
            self.log = MetricsLog(self.folder.path / "metrics.jsonl", start[1].step if start else 0)
        if self.config.train.trace:
            self.trace_log = TraceLog(Path(self.config.run_dir), self.job.session.rank)

    def _write_trace(self) -> None:
        """What was exchanged since the last call. Collective where a trace is written."""
        if self.config.train.trace:
            with mpi.together(self.job.session.comm):
                self.trace_log.write(self.job.trace.records)

    def close(self) -> None:
        """Close the logs."""
        for log in (self.log, self.trace_log):
            if log:
                log.close()

    def _is_finished(self, manifest: Manifest) -> bool:
        """Whether nothing is left to train, evaluate or report. Collective.

        A run that ended between its last checkpoint and its summary still has the test to do, and a run whose
        data.epochs or train.max_steps were raised goes on.
        """
        reached = manifest.finished and (manifest.epoch >= self.config.data.epochs
                                         or 0 < self.config.train.max_steps <= manifest.step)
        reported = (self.folder.path / "summary.json").is_file() if self.folder else False
        return bool(self.job.session.comm.bcast(reported)) and reached

    def _each_pass(self, report: PassReport) -> None:
        job, progress = self.job, self.progress
        self.seconds += report.seconds
        stats = self.stats.update(progress.stats, job.session.comm, job.trace)
        self._write_trace()
        counters = self._tiers()
        samples = int(report.samples.sum())
        loss = float(report.loss_sums.sum() / max(samples, 1))
        hits = counters["host_hits"] / max(1, counters["host_hits"] + counters["cold_hits"])
        merge_share = (job.mergers.seconds + job.row_merge_seconds) / max(self.seconds, 1e-9)
        self._log_steps(report)
        self._tell_bad_rows(self.feed.bad_rows())
        if self.log:
            self.log.write("pass", progress.step, loss=loss, auc=stats.auc(), logloss=stats.logloss(),
                           calibration=stats.calibration(), samples=samples, seconds=report.seconds,
                           train_seconds=report.train_seconds, tiers=counters, steps=len(report.samples))
        if report.period is not None:
            self._log_period(report.period)
        self.line.end_of_pass(progress.step, samples / report.seconds, loss, stats.auc(), hits, merge_share)
        every = self.config.eval.every_passes
        if self.test is not None and every and progress.passes % every == 0:
            self._evaluate()
        every = self.config.checkpoint.every_passes
        if every and progress.passes % every == 0 and not report.interrupted:
            self._save(finished=False)

    def _tell_bad_rows(self, bad: BadRows) -> None:
        """Say which rows could not be read when the first ones turn up; the summary has the rest."""
        lines = bad.lines()
        if lines and not self._told_bad_rows:
            self._told_bad_rows = True
            for line in lines:
                self.line.say(line)

    def _log_steps(self, report: PassReport) -> None:
        """One line of metrics.jsonl for every ``train.log_every`` steps, counted over all passes."""
        every = self.config.train.log_every
        for i, (loss_sum, samples) in enumerate(zip(report.loss_sums, report.samples)):
            self._window[0] += float(loss_sum)
            self._window[1] += int(samples)
            if (report.first_step + i + 1) % every == 0:
                self._flush_window(report.first_step + i + 1)

    def _log_period(self, mine: dict[str, dict[str, int]]) -> None:
        """One line of metrics.jsonl for every period of the lifecycle. Collective."""
        parts = self.job.session.comm.allgather(mine)
        tables = {name: _sum_dicts([part[name] for part in parts]) for name in mine}
        if self.log:
            every = self.config.lifecycle.every
            self.log.write("lifecycle", self.progress.step, samples=self.progress.samples // every * every, tables=tables)

    def _flush_window(self, step: int | None = None) -> None:
        loss_sum, samples, _ = self._window
        if samples and self.log:
            self.log.write("train", step or self.progress.step, loss=loss_sum / samples, samples=samples)
        self._window = [0.0, 0, 0]

    def _evaluate(self) -> BinaryStats:
        begin = time.perf_counter()
        stats = evaluate_job(self.job, self.test)
        if self.log:
            self.log.write("eval", self.progress.step, seconds=time.perf_counter() - begin, **stats.summary())
        if stats.samples:
            self.line.say(f"test at step {self.progress.step:,}: AUC {stats.auc():.4f}  logloss {stats.logloss():.4f}  "
                          f"calibration {stats.calibration():.3f}  ({stats.samples:,} samples)")
        else:
            self.line.say("the test part holds no row, so there are no test metrics; look at data.split and "
                          "data.test_files")
        return stats

    def _save(self, finished: bool) -> None:
        job, progress = self.job, self.progress
        epoch, position = self.feed.cursor()
        order = self.source.merge_positions(job.session.comm.allgather(position))
        manifest = Manifest(progress.step, progress.passes, progress.samples, progress.last_row_merge, epoch,
                            order.to_json(), job.session.size, [checkpoint_load.describe(t) for t in job.tables], {},
                            finished, self.config.seed, self._bytes(), self._tiers(),
                            workers=mpi.group_of(job.optimizer.members), exchanges=self._exchanges())
        arrays = {f"dense.{name}": value for name, value in job.optimizer.worker_state().items()}
        arrays |= {f"buffer.{name}": b.detach().cpu().numpy() for name, b in job.model.named_buffers()}
        arrays |= {"rng": rng_state(), "stats": progress.stats.to_array(), "window": np.array(self._window),
                   "seconds": np.array(self.seconds), "merges": np.array(job.optimizer.merges)}
        for table, life in zip(job.tables, job.lifecycles):
            arrays |= {f"lifecycle.{table.name}.{name}": value for name, value in (life.state() if life else {}).items()}
        stores = {table.name: store for table, store in zip(job.tables, job.stores)}
        saved = checkpoint_save.save(self.root, job.session.comm, manifest, arrays, stores, self.config.checkpoint.keep)
        if self.log:
            self.log.write("checkpoint", progress.step, path=str(saved.folder), finished=finished, bytes=saved.bytes,
                           new_bytes=saved.new_bytes, new_segments=saved.new_segments)

    def _load(self, folder: Path, manifest: Manifest) -> tuple[int, Any]:
        arrays = _restore(self.job, folder, manifest, resume_training=True, progress=self.line.opening)
        self.progress = Progress(manifest.step, manifest.passes, manifest.samples, manifest.last_row_merge,
                                 BinaryStats.from_array(arrays["stats"]))
        if "window" in arrays:
            self._window = [float(arrays["window"][0]), int(arrays["window"][1]), int(arrays["window"][2])]
            self.seconds = float(arrays["seconds"])
        self._bytes_before, self._tiers_before = manifest.bytes, manifest.tiers
        self._exchanges_before = manifest.exchanges
        order = OrderState.from_json(manifest.order)
        return manifest.epoch, order if order.epoch == manifest.epoch else None

    def _bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by purpose and link class since the run began, over all ranks. Collective."""
        now = self.job.bytes_so_far()
        return _sum_by_purpose(self._bytes_before, now)

    def _exchanges(self) -> dict[str, dict[str, float]]:
        """Calls and seconds by purpose since the run began. Collective."""
        return _sum_by_purpose(self._exchanges_before, self.job.exchanges_so_far())

    def _tiers(self) -> dict[str, int]:
        """Counters of the tiers since the run began, over all ranks; rows are those of now. Collective."""
        before = {name: count for name, count in self._tiers_before.items() if name != "rows"}
        return _sum_dicts([before, *self.job.session.comm.allgather(self.job.tier_counters())])

    def _summarise(self, result: BinaryStats | None) -> None:
        job, comm = self.job, self.job.session.comm
        self._tell_bad_rows(self.feed.bad_rows())
        stats = self.stats.update(self.progress.stats, comm, job.trace)
        self._write_trace()
        traffic, tiers, exchanges = self._bytes(), self._tiers(), self._exchanges()
        rss = comm.allgather(peak_rss_bytes())
        bad = self.feed.bad_rows()
        if not self.log:
            return
        test = result.summary() if result is not None else {}
        summary = {
            "samples": self.progress.samples, "steps": self.progress.step, "passes": self.progress.passes,
            "seconds": self.seconds, "samples_per_s": self.progress.samples / max(self.seconds, 1e-9),
            "test_auc": test.get("auc"), "test_logloss": test.get("logloss"),
            "test_calibration": test.get("calibration"), "test_samples": test.get("samples", 0),
            "train_auc": stats.auc(), "train_logloss": stats.logloss(), "train_calibration": stats.calibration(),
            "ranks": job.session.size, "replicas": len(job.replicas.groups), "k": self.config.merge.k,
            "k_rows": self.config.rows.k_rows, "merges": job.optimizer.merges,
            "merged_bytes": job.optimizer.merged_bytes, "merge_backend": job.mergers.between.backend, "bytes": traffic,
            "exchanges": exchanges,
            "tiers": tiers, "bad_rows": bad.count, "rows_read": bad.total, "bad_row_examples": bad.examples,
            "unmatched_rows": bad.unmatched, "peak_rss_bytes": max(rss),
            "device": str(job.device), "torch": torch.__version__}
        write_summary(Path(self.config.run_dir), summary)


def _hold_folders(held: ExitStack, config: Config, root: Path, start: tuple[Path, Manifest] | None,
                  resume: str) -> RunFolder:
    """The run folder, for this job alone until ``held`` closes, and with it the folder of checkpoints.

    A checkpoint of another run starts a new one. Raises UsageError when either folder is another run's.
    """
    run_dir = Path(config.run_dir)
    inside = root.resolve().is_relative_to(run_dir.resolve())
    own = [root.resolve(), run_dir.resolve()]
    continuing = bool(resume) and (start is None or any(start[0].resolve().is_relative_to(place) for place in own))
    earlier = earlier_checkpoint_dir(run_dir)
    folder = RunFolder(run_dir, config.overwrite, continuing)
    held.callback(folder.close)
    if inside:
        return folder
    held.callback(FolderLock(root, "checkpoint.dir").close)
    others = [] if continuing else complete(root)
    if others and not (config.overwrite and earlier == root.resolve()):
        raise UsageError(f"checkpoint.dir: {root} holds the checkpoints of another run, which would be removed; name "
                         "another folder, or continue that run with --resume auto")
    for each in others:
        shutil.rmtree(each)
    return folder


def _find_start(root: Path, resume: str) -> tuple[Path, Manifest] | None:
    if not resume:
        return None
    if resume == "auto":
        if not complete(root):
            return None
        folder = complete(root)[-1]
    else:
        folder = find(resume)
    return folder, read_manifest(folder)


def _config_of(folder: Path, where: str) -> Path:
    """config.yaml of the run that a checkpoint belongs to."""
    for place in (Path(where), folder.parent.parent, folder.parent):
        if (place / "config.yaml").is_file():
            return place / "config.yaml"
    raise UsageError(f"{where}: no config.yaml lies beside its checkpoints; name the run folder")


def _restore(job: Job, folder: Path, manifest: Manifest, resume_training: bool,
             progress: Callable[[int, int], None] | None = None) -> dict[str, np.ndarray]:
    """Bring dense state, buffers, generator and rows into ``job``; returns this rank's arrays. Collective."""
    session = job.session
    arrays: dict[str, np.ndarray] = {}
    segments: list[list[list[str]]] = []
    with mpi.together(session.comm):
        checkpoint_load.check_tables(manifest, job.tables)
        segments = checkpoint_load.segment_files(folder.parent, manifest)
        arrays = checkpoint_load.worker_arrays(folder, manifest, session.rank, mpi.group_of(job.optimizer.members))
        job.optimizer.load_worker_state(checkpoint_load.strip(arrays, "dense."))
        for name, buffer in job.model.named_buffers():
            buffer.copy_(torch.from_numpy(arrays[f"buffer.{name}"]))
        if resume_training and "rng" in arrays:
            set_rng_state(arrays["rng"])
        if resume_training and "merges" in arrays:
            job.optimizer.merges = int(arrays["merges"])
        if resume_training:
            for table, life in zip(job.tables, job.lifecycles):
                if life:
                    life.load(checkpoint_load.strip(arrays, f"lifecycle.{table.name}."))
    job.open_stores(segments, progress)
    return arrays


def _sum_by_purpose(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {purpose: _sum_dicts([before.get(purpose, {}), now.get(purpose, {})]) for purpose in {**before, **now}}


def _sum_dicts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out.get(name, 0) + value
    return out
