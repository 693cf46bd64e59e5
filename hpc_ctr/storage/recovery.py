"""Opening, checking and replacing the committed state of a cold store."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs, manifest
from hpc_ctr.storage.cold_index import ColdIndex
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.segment import Cursor, SegmentFile, SegmentInfo, latest, merge

LOCK = "store.lock"
_SEGMENT_NAME = re.compile(r"segment-(\d{10})\.h5")
_SCAN_BYTES = 64 << 20


@dataclass(eq=False)
class Segment:
    """A live segment: its open file, its number, the location of its first row, live rows, digest.

    Of a segment of deletions the rows are keys that were deleted; they are live as long as nothing newer is there.
    ``due``: no live row needs to be looked at by ``shrink`` before this sample count.
    """

    file: SegmentFile
    number: int
    base: int
    live: int
    digest: str
    due: int = 0

    @property
    def deletions(self) -> bool:
        """Whether this is a segment of deletions."""
        return self.file.deletions


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"segment-{number:010d}.h5"


def segment_number(name: str) -> int:
    """Number in a segment's file name, 0 when it is not one."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def committed_state(directory: str, layout: RecordLayout, name: str) -> manifest.Manifest:
    """The manifest of a directory, after making an empty one in a new directory.

    Raises StorageError when it is damaged or missing, or belongs to another table or layout.
    """
    names = fs.list_directory(directory)
    if manifest.NAME not in names:
        if lost := [file for file in names if segment_number(file)]:
            raise StorageError(f"{directory} holds segments such as {lost[0]} but no {manifest.NAME}: put "
                               "the manifest back, or empty the directory to start anew")
        manifest.prepare(directory, manifest.new(name, layout))
        manifest.publish(directory)
    state = manifest.load(directory)
    stored = RecordLayout(state.width, state.state, np.dtype(state.dtype), state.lifecycle)
    if stored != layout or state.table != name:
        raise StorageError(f"{directory} belongs to table {state.table!r} of {stored.describe()} (x + state)"
                           f", not to {name!r} of {layout.describe()}: give each table its own storage.dir")
    return state


def open_entry(directory: str, entry: manifest.Entry, layout: RecordLayout, direct: bool) -> SegmentFile:
    """Open a segment that the manifest names; StorageError when its header is not the one that was
    committed."""
    file = SegmentFile(os.path.join(directory, entry.file), layout, direct)
    if file.rows != entry.rows or file.metadata_digest() != entry.digest[16:]:
        file.close()
        raise StorageError(f"{file.path} is not the file that the manifest names (its header has changed): "
                           "start from the last checkpoint")
    return file


def rebuild(segments: list[Segment], index: ColdIndex) -> None:
    """Fill an index, and the live counts, by one walk by key through all segments, with every row checked."""
    cursors = [Cursor(s.file, _SCAN_BYTES // len(segments)) for s in segments]
    for parts in merge(cursors):
        keys, places = latest(parts)
        lengths = [len(part.keys) for part in parts]
        bases = [segments[part.cursor].base + part.first_row for part in parts]
        where = np.concatenate([base + np.arange(n) for base, n in zip(bases, lengths, strict=True)])
        owner = np.repeat([part.cursor for part in parts], lengths)
        index.add(keys, where[places])
        for i, live in enumerate(np.bincount(owner[places], minlength=len(cursors))):
            segments[i].live += int(live)
    for cursor, segment in zip(cursors, segments, strict=True):
        if segment.file.digest_with(cursor.state) != segment.digest:
            raise StorageError(f"{segment.file.path} is not the file that the manifest names (rows are "
                               "missing or replaced): start from the last checkpoint")


def remove_leftovers(directory: str, state: manifest.Manifest) -> None:
    """Remove temporary files and segments that are not part of the committed state."""
    kept = {entry.file for entry in state.segments}
    for name in fs.list_directory(directory):
        if name.endswith(fs.TEMPORARY) or (segment_number(name) and name not in kept):
            fs.remove(os.path.join(directory, name))


def verify(directory: str) -> list[str]:
    """Check a store's manifest and every byte of its segments without opening it; one sentence for each
    damage."""
    try:
        state = manifest.load(directory)
    except StorageError as error:
        return [str(error)]
    problems = []
    for entry in state.segments:
        path = os.path.join(directory, entry.file)
        try:
            with SegmentFile(path) as file:
                if file.digest() != entry.digest:
                    raise StorageError(f"{path} is damaged: its digest is not the one in the manifest")
        except StorageError as error:
            problems.append(str(error))
    return problems


def adopt(directory: str, layout: RecordLayout, segments: Sequence[str | SegmentInfo],
          name: str = "default") -> None:
    """Make ``directory`` a store of exactly these segments (of a checkpoint), in this order, by hard link or
    copy.

    What it held is dropped when, and only when, the new state is committed. Raises StorageError when a
    segment is damaged or of another layout.
    """
    fs.make_directory(directory)
    lock = fs.lock(os.path.join(directory, LOCK))
    try:
        number = max(map(segment_number, fs.list_directory(directory)), default=0) + 1
        with contextlib.suppress(StorageError):
            number = max(number, manifest.load(directory).next_number)
        entries = []
        for segment in segments:
            source, digest = segment, None
            if isinstance(segment, SegmentInfo):
                source, digest = segment.path, segment.digest
            with SegmentFile(source, layout) as file:
                entry = manifest.Entry(segment_name(number), file.rows, file.rows, digest or file.digest())
            fs.link_or_copy(source, os.path.join(directory, entry.file))
            entries.append(entry)
            number += 1
        fs.sync_directory(directory)
        state = manifest.new(name, layout, number, tuple(entries))
        manifest.prepare(directory, state)
        manifest.publish(directory)
    finally:
        fs.close(lock)
