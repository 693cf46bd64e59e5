"""What lies on disk, in numbers and words, without opening a store: it may be in use meanwhile."""

import os
from typing import Any

import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import cold_index, fs, manifest, recovery

_OF_EVERY_ROW = {"key", "check", "t", "x", "state"}


def stores_below(directory: str) -> list[str]:
    """Directories of stores: ``directory`` itself and those below it, sorted."""
    found = []
    for path, _, names in os.walk(directory):
        marks = manifest.NAME in names and _is_manifest(os.path.join(path, manifest.NAME), names)
        if marks or any(map(recovery.segment_number, names)):
            found.append(path)
    return sorted(found)


def _is_manifest(path: str, names: list[str]) -> bool:
    """Other programs have a manifest.json too; a damaged one of a store is known by what lies beside it."""
    return recovery.LOCK in names or b"hpc_ctr store" in fs.read_file(path)


def describe_store(directory: str) -> dict[str, Any]:
    """The committed state of a store. Raises StorageError when its manifest or a file it names cannot be read.

    Keys: directory, table, width, state, dtype, row_bytes, rows, live, deletions (keys that are noted as deleted),
    stale_share, disk_bytes, index_bytes (at most, when the store is open), columns (fields and datasets of the segments
    beyond those that every table has), segments: a list of file, rows, live, bytes, deletions (whether its rows are
    deletions).
    """
    state = manifest.load(directory)
    layout = state.layout
    segments, columns = [], []
    for entry in state.segments:
        path = os.path.join(directory, entry.file)
        segments.append({"file": entry.file, "rows": entry.rows, "live": entry.live, "bytes": fs.size(path),
                         "deletions": False})
        if state.lifecycle or len(segments) == 1:
            attributes, columns = _header(path)
            segments[-1]["deletions"] = bool(attributes.get("deletions", 0))
    rows, live, nbytes = (sum(segment[name] for segment in segments) for name in ("rows", "live", "bytes"))
    deletions = sum(segment["live"] for segment in segments if segment["deletions"])
    return {"directory": directory, "table": state.table, "width": state.width, "state": state.state,
            "dtype": state.dtype, "row_bytes": layout.stored_bytes, "rows": rows, "live": live - deletions,
            "deletions": deletions, "stale_share": 1 - live / rows if rows else 0.0, "disk_bytes": nbytes,
            "index_bytes": cold_index.bytes_for(live), "columns": columns, "segments": segments}


def describe_segment(path: str, rows: int) -> dict[str, Any]:
    """A segment file as h5py sees it: path, bytes, attributes, datasets (name -> shape and type), first_rows.

    first_rows: up to ``rows`` rows of the dataset ``rows``, each a dict by field. Raises StorageError when the file is
    no HDF5 file.
    """
    nbytes = fs.size(path)
    try:
        with fs.open_hdf5(path) as file:
            attributes = {name: _plain(value) for name, value in file.attrs.items()}
            datasets = {name: f"{list(part.shape)} {part.dtype}" for name, part in file.items()}
            first = file["rows"][:rows] if "rows" in file else []
    except Exception as error:
        raise StorageError(f"{path} is damaged or no segment ({error}): start from the last checkpoint") from error
    return {"path": path, "bytes": nbytes, "attributes": attributes, "datasets": datasets,
            "first_rows": [{name: _plain(row[name]) for name in row.dtype.names} for row in first]}


def _header(path: str) -> tuple[dict[str, Any], list[str]]:
    """Attributes of a segment, and its further columns."""
    try:
        with fs.open_hdf5(path) as file:
            names = [name for name in (*file["rows"].dtype.names, *file) if name not in _OF_EVERY_ROW and name != "rows"]
            return dict(file.attrs), names
    except Exception as error:
        raise StorageError(f"{path} is damaged or no segment ({error}): hpc-ctr store verify says more") from error


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value    # text of a fixed length
