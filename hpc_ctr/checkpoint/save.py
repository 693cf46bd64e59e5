"""Writing a checkpoint: between passes, by all ranks together."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr.checkpoint.state import Manifest, complete, folder_of, read_manifest
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
    partial = folder.with_name(folder.name + ".partial")
    with together(comm):
        if comm.rank == 0:
            for path in (partial, folder):
                if path.exists():
                    shutil.rmtree(path)
            (root / "pool").mkdir(parents=True, exist_ok=True)
            partial.mkdir()
    mine: dict[str, list[str]] = {}
    with together(comm):
        for name, store in stores.items():
            store.flush()
            mine[name] = [_into_pool(root / "pool", segment.path, segment.digest) for segment in store.segments()]
        _write_arrays(partial / f"rank-{comm.rank:04d}.npz", arrays)
    everyone = comm.gather(mine)
    with together(comm):
        if comm.rank == 0:
            manifest.segments = {name: [segments[name] for segments in everyone] for name in stores}
            fs.write_file(str(partial / "checkpoint.json"), manifest.to_json().encode())
            fs.sync_directory(str(root / "pool"))
            fs.rename(str(partial), str(folder))  # nothing in it is named by anybody until DONE is there
            fs.write_file(str(folder / "DONE"), b"")
            fs.sync_directory(str(folder))
            fs.sync_directory(str(root))
            _collect(root, folder, keep)
    return folder


def _into_pool(pool: Path, segment: str, digest: str) -> str:
    name = f"{digest}.h5"
    if not (pool / name).exists():
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
    found = complete(root)
    kept = [folder for folder in found if folder.name <= last.name][-keep:]
    for old in (folder for folder in found if folder not in kept):
        (old / "DONE").unlink()  # no checkpoint any more, whatever happens to the rest
        shutil.rmtree(old)
    for left in root.glob("step-*"):
        if not (left / "DONE").is_file():
            shutil.rmtree(left)
    used = {file for folder in complete(root) for ranks in read_manifest(folder).segments.values()
            for files in ranks for file in files}
    for path in (root / "pool").iterdir():
        if path.name not in used:
            path.unlink()
