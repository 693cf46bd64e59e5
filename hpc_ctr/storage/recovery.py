"""Opening, checking and replacing the committed state of a cold store."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs, manifest
from hpc_ctr.storage.cold_index import ColdIndex
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.scan import Progress, key_cursors, read_whole, walk
from hpc_ctr.storage.segment import SegmentFile, SegmentInfo, latest

LOCK = "store.lock"
_VERIFY_ROUNDS = 8
_SEGMENT_NAME = re.compile(r"segment-(\d{10})\.h5")


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
    stored = state.layout
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


def rebuild(segments: list[Segment], index: ColdIndex, progress: Progress | None = None) -> None:
    """Fill an index, and the live counts, by one walk by key through all segments, with every row checked.

    progress: called with bytes read so far and bytes in all.
    """
    cursors = key_cursors([segment.file for segment in segments])
    with contextlib.closing(walk(cursors, progress)) as steps:
        for parts in steps:
            keys, places = latest(parts)
            lengths = [len(part.keys) for part in parts]
            bases = [segments[part.cursor].base + part.first_row for part in parts]
            where = np.concatenate([base + np.arange(n) for base, n in zip(bases, lengths, strict=True)])
            owner = np.repeat([part.cursor for part in parts], lengths)
            index.add(keys, where[places])
            for i, live in enumerate(np.bincount(owner[places], minlength=len(cursors))):
                segments[i].live += int(live)
    for cursor, segment in zip(cursors, segments, strict=True):
        if cursor.digest() != segment.digest:
            raise StorageError(f"{segment.file.path} is not the file that the manifest names (rows are "
                               "missing or replaced): start from the last checkpoint")


def remove_leftovers(directory: str, state: manifest.Manifest) -> None:
    """Remove temporary files and segments that are not part of the committed state."""
    kept = {entry.file for entry in state.segments}
    left = [name for name in fs.list_directory(directory)
            if name.endswith(fs.TEMPORARY) or (segment_number(name) and name not in kept)]
    if left:
        # The process that made them may have ended between the rename of its manifest and the sync: were power
        # lost now, the former manifest would be back, and it names files that are removed here.
        fs.sync_directory(directory)
    for name in left:
        fs.remove(os.path.join(directory, name))


def verify(directory: str, progress: Progress | None = None) -> list[str]:
    """Check a store's manifest and every byte of its segments without opening it; one sentence for each damage.

    Nothing is written and no lock is taken, so it works beside a process that uses the store: a segment that this
    process drops meanwhile is left out, and those that it adds are checked too, as far as it does not run ahead.
    """
    seen: dict[manifest.Entry, str] = {}
    try:
        state = manifest.load(directory)
        for _ in range(_VERIFY_ROUNDS):
            fresh = [entry for entry in state.segments if _same_file(entry) not in seen]
            seen |= zip(map(_same_file, fresh), _damage(directory, fresh, progress), strict=True)
            before, state = state, manifest.load(directory)
            if state == before:
                break
    except StorageError as error:
        return [str(error)]
    named = set(map(_same_file, state.segments))
    return [problem for entry, problem in seen.items() if problem and entry in named]


def _same_file(entry: manifest.Entry) -> manifest.Entry:
    """The entry without its count of live rows, which changes while the file stays."""
    return replace(entry, live=0)


def _damage(directory: str, entries: list[manifest.Entry], progress: Progress | None) -> list[str]:
    """What is wrong with each segment, "" where nothing is."""
    problems = [""] * len(entries)
    files, places = [], []
    with contextlib.ExitStack() as stack:
        for i, entry in enumerate(entries):
            try:
                files.append(stack.enter_context(SegmentFile(os.path.join(directory, entry.file))))
                places.append(i)
            except StorageError as error:
                problems[i] = str(error)
        for i, file, found in zip(places, files, read_whole(files, progress), strict=True):
            if isinstance(found, StorageError):
                problems[i] = str(found)
            elif found != entries[i].digest:
                problems[i] = f"{file.path} is damaged: its digest is not the one in the manifest"
    return problems


def adopt(directory: str, layout: RecordLayout, segments: Sequence[str | SegmentInfo],
          name: str = "default", progress: Progress | None = None) -> None:
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
        for segment, (rows, digest) in zip(segments, _describe(segments, layout, progress), strict=True):
            entry = manifest.Entry(segment_name(number), rows, rows, digest)
            source = segment.path if isinstance(segment, SegmentInfo) else segment
            fs.link_or_copy(source, os.path.join(directory, entry.file))
            entries.append(entry)
            number += 1
        fs.sync_directory(directory)
        state = manifest.new(name, layout, number, tuple(entries))
        manifest.prepare(directory, state)
        manifest.publish(directory)
    finally:
        fs.close(lock)


def _describe(segments: Sequence[str | SegmentInfo], layout: RecordLayout, progress: Progress | None
              ) -> list[tuple[int, str]]:
    """Rows and digest of each segment; files whose digest is not given are read for it."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SegmentFile(s.path if isinstance(s, SegmentInfo) else s, layout)) for s in segments]
        digests = [s.digest if isinstance(s, SegmentInfo) else "" for s in segments]
        unknown = [i for i, digest in enumerate(digests) if not digest]
        for i, found in zip(unknown, read_whole([files[i] for i in unknown], progress), strict=True):
            if isinstance(found, StorageError):
                raise found
            digests[i] = found
        return [(file.rows, digest) for file, digest in zip(files, digests, strict=True)]
