"""Reading a checkpoint, on the rank count that wrote it or on another."""

from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr.checkpoint.state import Manifest, read_arrays
from hpc_ctr.embedding.table import Table
from hpc_ctr.errors import StorageError, UsageError
from hpc_ctr.optim.flat import combine_worker_states


def check_tables(manifest: Manifest, tables: list[Table]) -> None:
    """Raises UsageError when the job's tables are not those of the checkpoint."""
    for have, want in zip(manifest.tables, [describe(t) for t in tables]):
        for name in want | have:
            if have.get(name) != want.get(name):
                raise UsageError(f"embedding: table {want['name']!r} has {name} {want.get(name)!r} in the job but "
                                 f"{have.get(name)!r} in the checkpoint; use the job file that wrote it")
    if len(manifest.tables) != len(tables):
        raise UsageError(f"embedding.tables: the job has {len(tables)} tables, the checkpoint {len(manifest.tables)}")


def describe(table: Table) -> dict[str, Any]:
    """What of a table must be the same for its rows to be read again."""
    out = {"name": table.name, "fields": list(table.fields), "dim": table.dim, "first_order": table.first_order,
           "dtype": table.dtype.name, "optimizer": table.optimizer}
    return out | ({"lifecycle": True} if table.lifecycle else {})


def segment_files(root: Path, manifest: Manifest) -> list[list[list[str]]]:
    """Paths of the segments by table and by the rank that wrote them, oldest first. Raises StorageError."""
    out = [[[str(root / "pool" / file) for file in files] for files in manifest.segments[table["name"]]]
           for table in manifest.tables]
    for path in (path for table in out for files in table for path in files):
        if not Path(path).exists():
            raise StorageError(f"{path}: this segment of the checkpoint is missing")
    return out


def worker_arrays(folder: Path, manifest: Manifest, rank: int, workers: list[int]) -> dict[str, np.ndarray]:
    """This rank's arrays; on another rank count, or where ``workers`` (the dense worker of every rank) are others, the
    dense state is combined from all (see combine_worker_states).

    Statistics of all old ranks are added up on rank 0; show counters come for all shards; the generator starts anew.
    """
    same_ranks = len(workers) == manifest.ranks
    if same_ranks and workers == (manifest.workers or list(range(manifest.ranks))):
        return read_arrays(folder, rank)
    all_arrays = [read_arrays(folder, old) for old in range(manifest.ranks)]
    dense = combine_worker_states([strip(arrays, "dense.") for arrays in all_arrays])
    out = {f"dense.{name}": value for name, value in dense.items()}
    if same_ranks:
        return {name: value for name, value in all_arrays[rank].items() if not name.startswith("dense.")} | out
    out.update({name: value for name, value in all_arrays[0].items() if name.startswith("buffer.")})
    stats = [arrays["stats"] for arrays in all_arrays]
    out["stats"] = np.sum(stats, axis=0) if rank == 0 else np.zeros_like(stats[0])
    for name in (name for name in all_arrays[0] if name.startswith("lifecycle.")):
        parts = [arrays[name] for arrays in all_arrays]
        if name.endswith(".filter"):
            out[name] = np.concatenate(parts)  # ranks own ascending ranges of shards
        else:
            out[name] = np.sum(parts, axis=0) if rank == 0 else np.zeros_like(parts[0])
    return out


def strip(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose name begins with ``prefix``, without it."""
    return {name[len(prefix):]: value for name, value in arrays.items() if name.startswith(prefix)}
