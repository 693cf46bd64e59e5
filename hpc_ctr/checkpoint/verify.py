"""Reading everything that checkpoints hold, to say what is damaged. Imports no torch."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from hpc_ctr.checkpoint.state import read_arrays, read_manifest
from hpc_ctr.errors import StorageError
from hpc_ctr.storage.scan import Progress, read_whole
from hpc_ctr.storage.segment import SegmentFile

_FILES_AT_ONCE = 64


def verify_checkpoints(folders: Sequence[Path], progress: Progress | None = None) -> list[str]:
    """One sentence for each damaged file of these checkpoints (of one root): segments, counters and arrays.

    A segment's name in the pool is its digest. Nothing is written; a checkpoint that is removed meanwhile, by the run
    that wrote it, is left out. progress: bytes of segments read so far and in all.
    """
    problems: dict[str, list[str]] = {}     # by folder, in their order
    users: dict[Path, list[str]] = {}       # of each segment: the folders that name it
    for folder in folders:
        of_folder = problems.setdefault(str(folder), [])
        try:
            manifest = read_manifest(folder)
        except StorageError as error:
            of_folder.append(str(error))
            continue
        for rank in range(manifest.ranks):
            try:
                read_arrays(folder, rank)
            except StorageError as error:
                of_folder.append(str(error))
        names = {name for ranks in manifest.segments.values() for files in ranks for name in files}
        for name in sorted(names):
            users.setdefault(folder.parent / "pool" / name, []).append(str(folder))
    for path, said in _damage(list(users), progress).items():
        for folder in users[path]:
            problems[folder].append(said)
    there = [folder for folder in folders if folder.is_dir()]
    said = [line for folder in folders if folder in there for line in problems[str(folder)]]
    return list(dict.fromkeys(said))        # a segment that several checkpoints name is told once


def _damage(paths: list[Path], progress: Progress | None) -> dict[Path, str]:
    """What is wrong with segments of a pool; those that are sound are not in it."""
    total = sum(path.stat().st_size for path in paths if path.is_file())
    found: dict[Path, str] = {}
    before = 0
    for begin in range(0, len(paths), _FILES_AT_ONCE):
        files: dict[Path, SegmentFile] = {}
        with contextlib.ExitStack() as stack:
            for path in paths[begin:begin + _FILES_AT_ONCE]:
                try:
                    files[path] = stack.enter_context(SegmentFile(str(path)))
                except StorageError as error:
                    found[path] = str(error)
            at = before
            tell = None if progress is None else lambda done, _, at=at: progress(min(at + done, total), total)
            for path, digest in zip(files, read_whole(list(files.values()), tell), strict=True):
                if isinstance(digest, StorageError):
                    found[path] = str(digest)
                elif digest != path.stem:
                    found[path] = f"{path} is damaged: its digest is not the one in its name"
            before += sum(file.nbytes for file in files.values())
    return found
