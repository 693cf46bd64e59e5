"""One rank of a run of ``bench tiers``: fill the table, train, and write down what happened.

``python -m hpc_ctr.bench.tiers_job JOB DATA OUT``: a job file on generated data, the folder of that data, and the file
for the report (JSON, by rank 0).
"""

import gc
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr import config as job_file
from hpc_ctr.bench import page_cache
from hpc_ctr.cluster.launch import start_job
from hpc_ctr.comm.session import run_and_exit, together
from hpc_ctr.data.keys import id_keys, missing_key
from hpc_ctr.data.source import open_source
from hpc_ctr.data.synthetic import SyntheticOptions, field_ids
from hpc_ctr.embedding.init import init_rows
from hpc_ctr.exchange.replicas import owners_of
from hpc_ctr.report.run_folder import write_json
from hpc_ctr.train.feed import Feed
from hpc_ctr.train.job import Job, default_store_dir
from hpc_ctr.train.loop import PassReport, Progress, run

_FILL_ROWS = 1 << 16


def main(argv: list[str]) -> int:
    """Run one rank. Collective."""
    job_path, data, out = (Path(word) for word in argv)
    config = job_file.load(job_path)
    session = start_job()
    comm = session.comm
    options = SyntheticOptions(**json.loads((data / "synthetic.json").read_text())["settings"])
    source = open_source(config.data, config.seed, comm, "train")
    names = [field.name for field in source.fields]
    passes: list[dict[str, Any]] = []
    losses: list[np.ndarray] = []
    store_dir = default_store_dir(config) / f"rank-{session.rank:04d}"
    before = memory_without_rows(config, session, source, names, store_dir)
    with Job(config, session, source.num_dense, names, store_dir) as job:
        job.open_stores()
        rows = 0
        with together(comm):
            rows = fill(job, options, names)

        def each_pass(report: PassReport) -> None:
            losses.append(report.loss_sums)
            counted = {"disk_read": page_cache.bytes_read() or 0}
            for store in job.stores:
                page_cache.drop(segment.path for segment in store.segments())
                for name, count in asdict(store.counters()).items():
                    counted[name] = counted.get(name, 0) + count
            everyone = comm.allgather(counted)
            passes.append({"samples": int(report.samples.sum()), "seconds": report.seconds,
                           **{name: sum(each[name] for each in everyone) for name in counted}})

        feed = Feed(source, config.data.epochs, comm, job.tables, job.pass_budget)
        try:
            run(job, feed, Progress(), each_pass)
        finally:
            feed.close()
        memory = comm.allgather({"rows": rows, "before": before, "peak": _memory("VmHWM"),
                                 "budget": job.plan.host_budget})
        job.drop_stores()
    if session.is_root:
        series = np.concatenate(losses) if losses else np.zeros(0)
        write_json(out, {"passes": passes, "memory": memory, "losses": [float(loss).hex() for loss in series]})
    return 0


def memory_without_rows(config: Any, session: Any, source: Any, names: list[str], store_dir: Path) -> int:
    """Bytes of this process when it has trained two steps and its tables are gone: libraries with their buffers,
    compiled kernels, reader. Collective."""
    short = replace(config, train=replace(config.train, max_steps=2))
    with Job(short, session, source.num_dense, names, store_dir) as job:
        job.open_stores()
        feed = Feed(source, 1, session.comm, job.tables, job.pass_budget)
        try:
            run(job, feed, Progress(), lambda report: None)
        finally:
            feed.close()
        job.drop_stores()
    del job, feed
    gc.collect()
    return _memory("VmRSS")


def fill(job: Job, options: SyntheticOptions, names: list[str]) -> int:
    """Put every row that this rank owns, as if it had just been made; returns how many.

    A row's first value depends on its key alone, so training goes as it would from an empty table. Each put takes
    popular and rare ids of all fields, so that segments know nothing of what will be wanted together.
    """
    (table,), (store,) = job.tables, job.stores
    rank, size = job.session.rank, job.session.size
    chunks = -(-options.ids // _FILL_ROWS)
    rows = 0
    for chunk in range(chunks):
        keys = [id_keys(name, field_ids(options, f, chunk, chunks)) for f, name in enumerate(names)]
        if chunk == 0:
            keys.append(np.array([missing_key(name) for name in names], np.uint64))
        keys = np.concatenate(keys)
        keys = keys[owners_of(keys, size) == rank]
        records = np.zeros((len(keys), table.floats), table.dtype)
        records[:, :table.width] = init_rows(keys, job.config.seed, table.width, table.dim, table.init_scale, table.dtype)
        store.put(keys, records, np.zeros(len(keys), np.uint32))
        rows += len(keys)
    return rows


def _memory(name: str) -> int:
    """Bytes from /proc/self/status. (getrusage's peak would be that of the process that started this one.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
