"""Writing a checkpoint: between passes, by all ranks together."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr.checkpoint.state import DONE, FORMER, Manifest, complete, folder_of, read_manifest
from hpc_ctr.comm.session import together
from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs
from hpc_ctr.storage.segment import SegmentInfo
from hpc_ctr.storage.tiered import TieredStore


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written: its folder, and over all ranks the bytes of its segments and how many of them are
    new in the pool (copied there, or linked where the pool is on the store's file system)."""

    folder: Path
    bytes: int
    new_bytes: int
    new_segments: int


def save(root: Path, comm: Any, manifest: Manifest, arrays: dict[str, np.ndarray], stores: dict[str, TieredStore],
         keep: int) -> Saved:
    """Write the checkpoint of ``manifest.step`` below ``root``, and remove all but the last ``keep``. Collective.

    arrays: this rank's own state. stores: this rank's tiers by table; they are flushed, and every segment that the
    pool lacks is linked or copied into it. The manifest's ``segments`` is filled in here. When it fails, for want of
    room say, the checkpoints that were there are as they were, and what was written already is removed again.
    """
    folder = folder_of(root, manifest.step)
    partial, pool = folder.with_name(folder.name + ".partial"), root / "pool"
    mine = _Segments(pool)
    saved: Saved | None = None
    try:
        with together(comm):
            if comm.rank == 0:
                fs.make_directory(str(pool))
                fs.remove_tree(str(partial))
                fs.make_directory(str(partial))
        with together(comm):
            for name, store in stores.items():
                store.flush()
                mine.add(name, store.segments())
            _write_arrays(partial / f"rank-{comm.rank:04d}.npz", arrays)
        everyone = comm.gather((mine.names, np.array([mine.bytes, mine.new_bytes, len(mine.new)])))
        with together(comm):
            if comm.rank == 0:
                manifest.segments = {name: [names[name] for names, _ in everyone] for name in stores}
                saved = Saved(folder, *sum(counts for _, counts in everyone).tolist())
                fs.write_file(str(partial / "checkpoint.json"), manifest.to_json().encode())
                fs.sync_directory(str(partial))
                fs.sync_directory(str(pool))
    except Exception:
        mine.take_back()
        if comm.rank == 0:
            with contextlib.suppress(StorageError):
                fs.remove_tree(str(partial))
        raise
    with together(comm):
        if comm.rank == 0:
            _publish(partial, folder)
            _collect(root, folder, keep)
    return comm.bcast(saved)


class _Segments:
    """This rank's segments of the checkpoint that is being written, on their way into the pool.

    names: by table, as the manifest lists them; bytes: of all; new, new_bytes: of those that the pool lacked.
    """

    def __init__(self, pool: Path):
        self._pool = pool
        self.names: dict[str, list[str]] = {}
        self.new: list[str] = []
        self.bytes = self.new_bytes = 0

    def add(self, table: str, segments: list[SegmentInfo]) -> None:
        """Link or copy what the pool lacks of a table's segments."""
        self.names[table] = names = []
        for segment in segments:
            name = f"{segment.digest}.h5"
            path = str(self._pool / name)
            if not fs.exists(path):
                fs.link_or_copy(segment.path, path)
                self.new.append(path)
                self.new_bytes += segment.nbytes
            self.bytes += segment.nbytes
            names.append(name)

    def take_back(self) -> None:
        """Remove what this added: no checkpoint names it, and the disk may be full."""
        for path in self.new:
            fs.remove_quietly(path)


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
