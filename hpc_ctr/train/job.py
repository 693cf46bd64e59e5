"""Everything a running job holds: model, optimizer, tables, stores, replicas, counters."""

import contextlib
import hashlib
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_ctr import models
from hpc_ctr.cluster.cpus import numa_domain
from hpc_ctr.comm.session import Session, together
from hpc_ctr.comm.trace import Trace, link_classes, total
from hpc_ctr.data.keys import default_key
from hpc_ctr.embedding.table import Table, make_tables
from hpc_ctr.errors import UsageError
from hpc_ctr.exchange.lifecycle import TableLifecycle
from hpc_ctr.exchange.replicas import keys_of_owner, make_replicas
from hpc_ctr.optim.build import make_dense_optimizer, make_mergers
from hpc_ctr.storage.scan import Progress
from hpc_ctr.storage.tiered import TieredStore
from hpc_ctr.train.plan import PASSES_IN_FLIGHT, PassBudget, make_plan


class Job:
    """One rank's part of a job. A context manager: leaving it closes the stores. Collective to make.

    ``open_stores`` must be called before anything is trained or evaluated.

    config: a resolved Config; num_dense and field_names describe the data; store_dir is the directory on local disk
    below which this rank keeps its cold rows (one directory a table).
    """

    def __init__(self, config: Any, session: Session, num_dense: int, field_names: list[str], store_dir: Path):
        self.config = config
        self.session = session = replace(session, ranks_per_node=config.cluster.ranks_per_node)
        self.device = choose_device(config.device, session)
        self.dtype = getattr(torch, config.dtype)
        self.autocast = config.precision == "bfloat16"
        torch.set_num_threads(config.train.threads)
        name = config.model.name
        self.tables = make_tables(config.embedding, field_names, models.needs_first_order(name),
                                  models.wants_vectors(name), config.lifecycle)
        self.field_names = field_names
        ranks_here = sum(host == session.hosts[session.rank] for host in session.hosts)
        self.plan = make_plan(config.storage.host_budget, self.tables, ranks_here, session.size)
        self.replicas = make_replicas(session, config.rows.replica)
        self.pass_budget = PassBudget(self.plan.passes // PASSES_IN_FLIGHT, self.replicas.several)
        self.trace = Trace(link_classes(session.node_of, session.rank, session.comm.allgather(numa_domain())),
                           [] if config.train.trace else None)
        self.row_merge_seconds = 0.0  # wall time, what the ranks do with the rows included

        torch.manual_seed(config.seed)  # the same dense parameters on every rank
        spec = models.ModelSpec(num_dense, [models.TableSpec(t.name, [field_names[f] for f in t.fields], t.dim)
                                            for t in self.tables], self.dtype)
        self.model = models.build(name, spec, config.model.options).to(self.device, self.dtype)
        self.mergers = make_mergers(config.merge, session, self.trace)
        self.optimizer = make_dense_optimizer(self.model.named_parameters(), config.dense, config.merge, self.mergers)
        torch.manual_seed((config.seed * 1_000_003 + session.rank) % 2**63)  # dropout and the like differ between ranks

        self.store_dir = store_dir
        self.stores: list[TieredStore] = []
        # by table; None where every key has a row for ever
        self.lifecycles = [TableLifecycle(table, default_keys(table, field_names), session.rank, session.size)
                           if table.lifecycle else None for table in self.tables]

    def open_stores(self, segments: list[list[list[str]]] | None = None, progress: Progress | None = None) -> None:
        """Open this rank's tiers, one a table: empty, or with the rows of a checkpoint. Collective.

        segments[table][old rank] lists segment files, oldest first. On the rank count that wrote them the files are
        taken as they are; on another every rank reads the range of keys that it owns out of all. Whatever an earlier
        run left in the directory is dropped. progress is called with bytes read so far and in all, table by table.
        """
        rank, size = self.session.rank, self.session.size
        with together(self.session.comm):
            make_outside(self.config)
            for number, table in enumerate(self.tables):
                directory = str(self.store_dir / table.name)
                layout = table.layout
                budget = self.plan.tiers[table.name]
                files = segments[number] if segments else [[] for _ in range(size)]
                same_ranks = len(files) == size
                self.stores.append(TieredStore.restore(directory, files[rank] if same_ranks else [], layout, budget,
                                                       table.name, progress=progress))
                if not same_ranks:
                    for of_rank in files:
                        self.stores[-1].load(of_rank, *keys_of_owner(rank, size))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc: Any) -> None:
        for store in self.stores:
            store.close()

    def drop_stores(self) -> None:
        """Close the tiers and remove their files: a checkpoint holds the rows."""
        for store in self.stores:
            store.close()
        shutil.rmtree(self.store_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # the last rank of a node finds it empty
            self.store_dir.parent.rmdir()

    def tier_counters(self) -> dict[str, int]:
        """Counters of this rank's stores and of their lifecycle, and their rows, summed over tables."""
        out: dict[str, int] = {}
        for store, life in zip(self.stores, self.lifecycles):
            counts = asdict(store.counters()) | {"rows": store.rows} | (life.counts if life else {})
            for name, count in counts.items():
                out[name] = out.get(name, 0) + count
        return out

    def bytes_so_far(self) -> dict[str, dict[str, int]]:
        """Bytes by purpose and link class, over all ranks. Collective."""
        mine = {purpose: dict(links) for purpose, links in self.trace.bytes.items()}
        for purpose, count in self.mergers.payload().items():
            mine.setdefault(purpose, {})["payload"] = count
        return total(self.session.comm.allgather(mine))

    def exchanges_so_far(self) -> dict[str, dict[str, float]]:
        """By purpose: calls, over all ranks, and seconds, of the rank that spent most. Collective."""
        parts = self.session.comm.allgather((dict(self.trace.calls), dict(self.trace.seconds)))
        purposes = sorted({purpose for calls, _ in parts for purpose in calls})
        return {purpose: {"calls": sum(calls.get(purpose, 0) for calls, _ in parts),
                          "seconds": max(seconds.get(purpose, 0.0) for _, seconds in parts)} for purpose in purposes}


def default_keys(table: Table, field_names: list[str]) -> np.ndarray:
    """Keys uint64 [F] of the default rows of the table's fields."""
    return np.array([default_key(field_names[f]) for f in table.fields], np.uint64)


def choose_device(name: str, session: Session) -> torch.device:
    """The torch device of this rank: GPUs are dealt to the ranks of a node in turn. Raises UsageError."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("device: cuda was asked for but torch sees no CUDA device; use device: auto or cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    here = [rank for rank, host in enumerate(session.hosts) if host == session.hosts[session.rank]]
    device = torch.device("cuda", here.index(session.rank) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def rng_state() -> np.ndarray:
    """torch's CPU generator as bytes (uint8): part of a checkpoint."""
    return torch.get_rng_state().numpy()


def set_rng_state(state: np.ndarray) -> None:
    """Put torch's CPU generator where ``rng_state`` found it."""
    torch.set_rng_state(torch.from_numpy(np.ascontiguousarray(state)))


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def default_store_dir(config: Any) -> Path:
    """Where the cold rows of a run lie: below storage.dir, else Slurm's local scratch, else in the run folder.

    Outside the run folder the run's path is part of the name, so that two runs on one disk do not meet.
    """
    outside = config.storage.dir or os.environ.get("SLURM_TMPDIR")
    if not outside:
        return Path(config.run_dir) / "store"
    run = Path(config.run_dir).resolve()
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return _expanded(outside) / f"hpc_ctr-{run.name}-{digest}"


def make_outside(config: Any) -> Path | None:
    """storage.dir, made where it is missing; None where the job names none. Raises UsageError."""
    if not config.storage.dir:
        return None
    path = _expanded(config.storage.dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"storage.dir: {path} cannot be made: {error.strerror or error}; name a folder on a local disk "
                         "where you may write") from error
    return path


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()
