"""Writing a checkpoint: between passes, by all ranks together."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr.checkpoint.state import DONE, FORMER, Manifest, complete, folder_of, read_manifest
from hpc_ctr.comm.session import together
from hpc_ctr.storage import fs
from hpc_ctr.storage.tiered import TieredStore


def save(root: Path, comm: Any, manifest: Manifest, arrays: dict[str, np.ndarray], stores: dict[str, TieredStore],
         keep: int) -> Path:
    """Write the checkpoint of ``manifest.step`` below ``root``, and remove all but the last ``keep``. Collective.

    arrays: this rank's own state. stores: this rank's tiers by table; they are flushed, and every segment that the
    pool lacks is linked or copied into it. The manifest's ``segments`` is filled in here.
    """
    folder = folder_of(root, manifest.step)
    partial, pool = folder.with_name(folder.name + ".partial"), root / "pool"
    with together(comm):
        if comm.rank == 0:
            fs.make_directory(str(pool))
            fs.remove_tree(str(partial))
            fs.make_directory(str(partial))
    mine: dict[str, list[str]] = {}
    with together(comm):
        for name, store in stores.items():
            store.flush()
            mine[name] = [_into_pool(pool, segment.path, segment.digest) for segment in store.segments()]
        _write_arrays(partial / f"rank-{comm.rank:04d}.npz", arrays)
    everyone = comm.gather(mine)
    with together(comm):
        if comm.rank == 0:
            manifest.segments = {name: [segments[name] for segments in everyone] for name in stores}
            fs.write_file(str(partial / "checkpoint.json"), manifest.to_json().encode())
            fs.sync_directory(str(partial))
            fs.sync_directory(str(pool))
            _publish(partial, folder)
            _collect(root, folder, keep)
    return folder


def _publish(partial: Path, folder: Path) -> None:
    """Give a folder its name, then its DONE; everything in it is on the disk by now, and so is the pool.

    A complete checkpoint of the same step is set aside until then: ``complete`` takes it up when the new one
    does not come to its DONE.
    """
    root = str(folder.parent)
    if (folder / DONE).is_file():
        former = folder.with_name(folder.name + FORMER)
        _discard(former)
        fs.sync_directory(root)  # or the old name might still be taken when the new one is given
        fs.rename(str(folder), str(former))
        fs.sync_directory(root)
    else:
        _discard(folder)
    fs.rename(str(partial), str(folder))
    fs.sync_directory(root)  # a DONE counts only in a folder that has its name
    fs.write_file(str(folder / DONE), b"")
    fs.sync_directory(str(folder))


def _discard(folder: Path) -> None:
    """Remove a folder; from the first step on, whatever happens to the rest, it is no checkpoint any more."""
    if folder.is_dir():
        fs.remove(str(folder / DONE))
        fs.sync_directory(str(folder))
        fs.remove_tree(str(folder))


def _into_pool(pool: Path, segment: str, digest: str) -> str:
    name = f"{digest}.h5"
    if not fs.exists(str(pool / name)):
        fs.link_or_copy(segment, str(pool / name))
    return name


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    fs.write_file(str(path), packed.getbuffer())


def _collect(root: Path, last: Path, keep: int) -> None:
    """Remove old checkpoints, then the segments that none of the others names, and what crashes left behind.

    Later steps than that of ``last``, just written, are of a course that was given up for an earlier checkpoint: as
    the newest they would push out those of this one, and --resume auto would take them up.
    """
    kept = [folder for folder in complete(root) if folder.name <= last.name][-keep:]
    for left in sorted(root.glob("step-*")):
        if left not in kept:
            _discard(left)
    used = {file for folder in kept for ranks in read_manifest(folder).segments.values()
            for files in ranks for file in files}
    for name in fs.list_directory(str(root / "pool")):
        if name not in used:
            fs.remove(str(root / "pool" / name))
