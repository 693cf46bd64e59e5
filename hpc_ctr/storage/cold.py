"""The cold tier: rows in immutable segment files on local SSD, found through an index in memory.

One ColdStore is one directory, used by one process and one thread. Every ``put`` writes one new segment and
commits it; a commit is the replacement of the manifest. Opening a directory gives exactly the last committed
state.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.kernels.rows import pack_rows
from hpc_ctr.storage import fs, manifest, recovery
from hpc_ctr.storage.claims import Claims
from hpc_ctr.storage.cold_index import LAST_LOCATION, ColdIndex
from hpc_ctr.storage.compact import compact_all, finish_rewrite, tidy
from hpc_ctr.storage.reader import SegmentMap, Wanted, read_rows
from hpc_ctr.storage.record import LATER, STORED_PREFIX_BYTES, RecordLayout, as_keys, as_words
from hpc_ctr.storage.recovery import Segment
from hpc_ctr.storage.rewrite import Rewrite
from hpc_ctr.storage.scan import Progress
from hpc_ctr.storage.segment import Cursor, SegmentFile, SegmentInfo, SegmentWriter, unpack

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class ColdStoreOptions:
    """How the cold tier reads and tidies up.

    gap_bytes: rows that lie so near to each other in a file are fetched by one read, through the gap;
    read_bytes: longest single read; threads: reads under way at once (each takes a buffer of a read); direct:
    read around the page cache, where the file system can; stale_share: while more than this share of all rows
    is superseded, the segments that are most stale are rewritten; max_segments: above it the smallest are
    merged; output_rows: rows of a segment that a rewrite makes, at least (a 64th of all rows when that is
    more); claim_bytes: memory for notes of rows that were overwritten unread (storage/claims.py, 12 bytes
    each); when it is full a put reads what it overwrites; scan_bytes: buffer for segments that are read from
    front to back; a rewrite takes about twice this; background_bytes: rewrites of so many bytes or more are begun a
    little earlier and run in a thread beside gets and puts.
    """

    gap_bytes: int = 12 << 10
    read_bytes: int = 128 << 10
    threads: int = 64
    direct: bool = True
    stale_share: float = 0.5
    max_segments: int = 96
    output_rows: int = 1 << 20
    claim_bytes: int = 256 << 20
    scan_bytes: int = 16 << 20
    background_bytes: int = 32 << 20


@dataclass
class ColdCounters:
    """What a cold store has done since it was opened."""

    segments_written: int = 0
    rows_written: int = 0
    rows_compacted: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    reads: int = 0


class ColdStore:
    """Rows by key on disk. Use as a context manager; closing needs no commit, for every ``put`` is one.

    directory: made if it is missing; layout: of the table's rows; name: the table's, stored in the files;
    progress: called while it opens, with bytes read so far and bytes in all.
    Raises StorageError when the store is damaged, holds another layout, or is open already.
    """

    def __init__(self, directory: str, layout: RecordLayout, name: str = "default",
                 options: ColdStoreOptions | None = None, progress: Progress | None = None):
        self.directory, self.layout, self.name = os.path.abspath(directory), layout, name
        self.options = options or ColdStoreOptions()
        self.counters = ColdCounters()
        self.index = ColdIndex()
        self.claims = Claims(self.options.claim_bytes)
        # called with (keys, old locations, new locations) when rows were moved by a rewrite
        self.on_move: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None
        self.rewriting: Rewrite | None = None  # under way in the background
        self._segments: list[Segment] = []
        self._deleted = 0  # entries of the index that are deletions
        self._lock = -1
        self._next_number = self._next_base = 1
        self._refusal = ""
        fs.make_directory(self.directory)
        self._lock = fs.lock(os.path.join(self.directory, recovery.LOCK))
        try:
            self._open(progress)
        except BaseException:
            self.close()
            raise

    # --- state

    @property
    def rows(self) -> int:
        """Live rows."""
        return len(self.index) - self._deleted

    @property
    def entries(self) -> int:
        """Entries of the index: live rows, and deleted keys that older segments may still hold."""
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory: the index, and the notes of rows that were overwritten unread."""
        return self.index.nbytes + self.claims.nbytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the segment files."""
        return sum(s.file.nbytes for s in self._segments)

    def segments(self) -> list[SegmentInfo]:
        """The committed segments; where a key is in several, the later one holds its row."""
        return [SegmentInfo(s.file.path, s.file.rows, s.live, s.digest, s.file.nbytes)
                for s in self._segments]

    @property
    def in_flight(self) -> list[Segment]:
        """The segments that are being rewritten in the background."""
        return self.rewriting.victims if self.rewriting is not None else []

    def segments_of(self, deletions: bool) -> list[Segment]:
        """The committed segments of rows, or those of deletions."""
        return [s for s in self._segments if s.deletions == deletions]

    # --- opening and committing

    def path_of(self, number: int) -> str:
        """The file of a segment."""
        return os.path.join(self.directory, recovery.segment_name(number))

    def _open(self, progress: Progress | None) -> None:
        state = recovery.committed_state(self.directory, self.layout, self.name)
        self._next_number = state.next_number
        for entry in state.segments:
            file = recovery.open_entry(self.directory, entry, self.layout, self.options.direct)
            number = recovery.segment_number(entry.file)
            self._segments.append(Segment(file, number, self.take_locations(file.rows), 0, entry.digest))
        self._map_segments()
        self.index.expect(sum(entry.live for entry in state.segments))
        recovery.rebuild(self._segments, self.index, progress)
        self._deleted = sum(s.live for s in self._segments if s.deletions)
        self.index.trim()
        recovery.remove_leftovers(self.directory, state)

    def take_numbers(self, count: int) -> list[int]:
        """Numbers for so many segments to come; their locations must be taken in the same order."""
        self.check_writable()
        first = self._next_number
        self._next_number += count
        return list(range(first, first + count))

    def take_locations(self, rows: int) -> int:
        """The location of the first of so many rows to come."""
        base = self._next_base
        if base + rows > LAST_LOCATION:
            raise StorageError(f"{self.directory}: 2^40 rows were written since it was opened; reopen it")
        self._next_base += rows
        return base

    def _map_segments(self) -> None:
        self.segment_map = SegmentMap.of((s.base, s.file) for s in self._segments)

    def check_writable(self) -> None:
        """Raise the error that an earlier, half-done commit left behind."""
        if self._refusal:
            raise StorageError(self._refusal)

    def write_segment(self, rows: int, deletions: bool = False) -> tuple[int, SegmentWriter]:
        """Number and writer of the next segment."""
        number = self.take_numbers(1)[0]
        return number, self.writer(number, rows, deletions)

    def writer(self, number: int, rows: int, deletions: bool = False) -> SegmentWriter:
        """Writer of the segment that has this number."""
        return SegmentWriter(self.path_of(number), self.layout, self.name, rows, deletions)

    def commit(self, number: int, digest: str, superseded: np.ndarray,
               keep: tuple[Segment, ...] = (), base: int | None = None) -> Segment:
        """Make a finished segment part of the committed state, and drop segments without live rows.

        superseded: how many rows of each segment, in the order of ``segments()``, are stale now. Segments in
        ``keep`` stay open even without live rows. base: the location of its first row, when that was taken before.
        """
        path = self.path_of(number)
        try:
            file = SegmentFile(path, self.layout, self.options.direct)
            base = self.take_locations(file.rows) if base is None else base
            added = Segment(file, number, base, file.rows, digest)
        except StorageError:
            fs.remove_quietly(path)
            raise
        self._commit([s.live - int(n) for s, n in zip(self._segments, superseded, strict=True)], added, keep)
        self.counters.segments_written += 1
        self.counters.rows_written += file.rows
        self.counters.bytes_written += file.nbytes
        return added

    def drop_dead(self) -> None:
        """Commit the state without segments that have no live row left."""
        self.check_writable()
        self._commit([s.live for s in self._segments], None, ())

    def _commit(self, lives: list[int], added: Segment | None, keep: tuple[Segment, ...]) -> None:
        pairs = list(zip(self._segments, lives, strict=True))
        keep += tuple(self.in_flight)
        # what was overwritten unread must be compared before it goes
        gone = [s for s, live in pairs if not live and s not in keep and s.number not in self.claims]
        kept = [(s, live) for s, live in pairs if s not in gone]
        if added is not None:
            kept.append((added, added.live))
            kept.sort(key=lambda pair: pair[0].number)  # what was written in the background comes before later puts
        entries = tuple(manifest.Entry(os.path.basename(s.file.path), s.file.rows, live, s.digest)
                        for s, live in kept)
        state = manifest.new(self.name, self.layout, self._next_number, entries)
        try:
            manifest.prepare(self.directory, state)
        except StorageError:
            if added is not None:
                added.file.close()
                fs.remove_quietly(added.file.path)
            raise
        try:
            manifest.publish(self.directory)
        except StorageError as error:
            # whether the disk holds the new manifest or the old one is not known: only reopening can tell
            if added is not None:
                added.file.close()
            self._refusal = f"the store {self.directory} must be reopened after a failed commit ({error})"
            raise
        for segment, live in kept:
            segment.live = live
        self._segments = [s for s, _ in kept]
        self._map_segments()
        for segment in gone:
            segment.file.close()
            fs.remove_quietly(segment.file.path)

    # --- reading

    def get(self, keys: np.ndarray, records: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Read rows: keys uint64 [n] -> records [n, floats] and t uint32 [n] filled; returns found bool [n].

        Rows of missing keys are left as they are. Raises StorageError naming file and row when a row is
        damaged.
        """
        keys = as_keys(keys)
        found, _ = self.fetch(keys, np.arange(len(keys)), as_words(records, self.layout), t)
        return found

    def locate(self, keys: np.ndarray) -> np.ndarray:
        """Location of each key's row, int64 [n], -1 where there is none; reads the rows that may be it."""
        found, locations = self._entries(keys)
        return np.where(found, locations, -1)

    def _entries(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As ``fetch``, without copying."""
        return self.fetch(keys, _NOTHING, np.empty((0, 0), np.uint32), np.empty(0, np.uint32))

    def fetch(self, keys: np.ndarray, targets: np.ndarray, words: np.ndarray, t: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
        """As ``get``, key i going to row ``targets[i]`` of ``words`` uint32 [*, W] and ``t``; an empty
        ``targets`` reads without copying. Returns found bool [n] and locations int64 [n] (-1 where
        missing; of a deleted key that of its deletion)."""
        if self._lock < 0:
            raise StorageError(self._refusal)
        found = np.zeros(len(keys), np.bool_)
        locations = np.full(len(keys), -1, np.int64)
        skip = np.zeros(len(keys), np.int64)
        active = np.arange(len(keys))
        # a matching fingerprint is only a candidate: the record read decides, and on a mismatch the next is
        # tried
        while len(active):
            candidates = self.index.find(keys[active], skip[active])
            there = candidates >= 0
            active, candidates = active[there], candidates[there]
            order = np.argsort(candidates, kind="stable")
            if self._deleted:
                deletion = self._are_deletions(candidates[order])
                gone = order[deletion]
                self._read(candidates[gone], active[gone], keys, _NOTHING, words, t, found)
                order = order[~deletion]
            self._read(candidates[order], active[order], keys, targets, words, t, found)
            hit = found[active]
            locations[active[hit]] = candidates[hit]
            active = active[~hit]
            skip[active] += 1
        lost = np.flatnonzero((locations < 0) & (skip > 0))  # something looked like the key and was not
        back = lost[[self._recover(keys[i]) for i in lost]] if len(lost) else lost
        if len(back):
            found[back], locations[back] = self.fetch(keys[back], targets[back] if len(targets) else targets, words, t)
        if self._deleted:
            found &= ~self._are_deletions(locations)
        return found, locations

    def _recover(self, key: np.uint64) -> bool:
        """Give a key its entry back when another one has claimed its row; whether it was so."""
        location = -1
        with self.index.lock:
            rivals = self.claims.rivals(key)
        for number, row in rivals:
            segment = next(s for s in self._segments if s.number == number)
            if segment.file.key_of(row) == int(key):
                location = max(location, segment.base + row)  # of several rows of one key the last written
        if location < 0:
            return False
        self._restore_entry(key, location)
        return True

    def _restore_entry(self, key: np.uint64, location: int) -> None:
        self.index.add(np.array([key]), np.array([location]))
        owner = self._segments[int(self._owners(np.array([location]))[0])]
        owner.live += 1
        self._deleted += owner.deletions

    def compare_claims(self, segment: Segment, first_row: int, keys: np.ndarray) -> int:
        """Compare the keys of rows from number ``first_row`` on with those that claimed them; returns how many rows
        turned out to be live."""
        if segment.number not in self.claims:
            return 0
        rows, claimants = self.claims.among(segment.number, first_row, len(keys))
        wrong = rows[claimants != keys[rows]]
        before = len(self.index)
        if len(wrong):
            self.locate(keys[wrong])  # which looks among the claims, and recovers
        return len(self.index) - before

    def settle_claims(self) -> None:
        """Compare every row that was overwritten unread, by reading the segments concerned."""
        finish_rewrite(self)
        for segment in [s for s in self._segments if s.number in self.claims]:
            cursor = Cursor(segment.file, self.options.scan_bytes)
            while len(cursor.rows):
                self.compare_claims(segment, cursor.first_row, cursor.keys)
                cursor.skip(len(cursor.rows))
                cursor.refill()
        for segment in self._segments:
            self.claims.drop(segment.number)

    def limit_claims(self, nbytes: int) -> None:
        """Change the memory for rows that were overwritten unread."""
        if not self.claims.limit(nbytes):
            self.settle_claims()

    def _are_deletions(self, locations: np.ndarray) -> np.ndarray:
        """Which locations (-1: none) lie in segments of deletions, bool [n]."""
        kinds = np.array([s.deletions for s in self._segments] + [False])  # -1 takes the last
        return kinds[self._owners(locations)]

    def _read(self, locations, places, keys, targets, words, t, found) -> None:
        options = self.options
        bad, reads, nbytes = read_rows(self.segment_map, Wanted(locations, places, keys, targets, words, t, found),
                                       self.layout.stored_bytes, options.gap_bytes, options.read_bytes, options.threads)
        if bad >= 0:
            raise self.damaged(int(locations[bad]))
        self.counters.reads += reads
        self.counters.bytes_read += nbytes

    def damaged(self, location: int) -> StorageError:
        """The error for a row whose check is wrong."""
        owner = self._segments[int(self._owners(np.array([location]))[0])]
        return owner.file.damaged(location - owner.base)

    def candidates(self, keys: np.ndarray) -> np.ndarray:
        """Where each key's row lies in all likelihood, int64 [n]; -1 where there is nothing to read. Reads nothing."""
        locations, _ = self.index.find_alone(keys)
        return np.where(self._are_deletions(locations), -1, locations) if self._deleted else locations

    def iterate(self, batch_rows: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Every live row once, by segment and in key order within it: (keys, records, t) of n <= batch_rows
        rows.

        The store must not be written to meanwhile.
        """
        self.settle_claims()
        for segment in [s for s in self._segments if not s.deletions]:
            cursor = Cursor(segment.file, batch_rows * self.layout.stored_bytes)
            while len(cursor.rows):
                rows, keys, first = cursor.rows[:batch_rows], cursor.keys[:batch_rows], cursor.first_row
                live = self.index.has(keys, segment.base + first + np.arange(len(keys)))
                if live.any():
                    yield unpack(rows[live], self.layout)
                cursor.skip(len(rows))
                cursor.refill()

    def due_rows(self, now: int, due: Callable[[np.ndarray], np.ndarray], batch_rows: int = 1 << 20
                 ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The live rows that are due by ``now``, about ``batch_rows`` at a time: keys, locations int64, life LIFE.

        ``due`` as for TieredStore.shrink. Segments that are known to have no such row are not read. Meanwhile rows may
        be deleted, and nothing else be written.
        """
        self.settle_claims()
        batch: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for segment in [s for s in self._segments if not s.deletions and s.due <= now]:
            if segment not in self._segments:  # its last row was deleted
                continue
            cursor = Cursor(segment.file, self.options.scan_bytes)
            first_due = LATER
            while len(cursor.rows):
                at = segment.base + cursor.first_row + np.arange(len(cursor.keys))
                life = self.layout.life(cursor.rows[:, STORED_PREFIX_BYTES // 4:])
                when = np.where(self.index.has(cursor.keys, at), due(life), LATER)
                taken = when <= now
                first_due = min(first_due, int(when.min()))
                batch.append((cursor.keys[taken], at[taken], life[taken]))
                cursor.skip(len(cursor.rows))
                cursor.refill()
            # next time it is read again if a row was due: the tiers above may have kept it
            segment.due = first_due
            if sum(len(keys) for keys, _, _ in batch) >= batch_rows:
                yield tuple(np.concatenate(column) for column in zip(*batch))
                batch = []
        if any(len(keys) for keys, _, _ in batch):
            yield tuple(np.concatenate(column) for column in zip(*batch))

    # --- writing

    def put(self, keys: np.ndarray, records: np.ndarray, t: np.ndarray) -> None:
        """Insert or overwrite rows, as one new segment, durably: keys uint64 [n] distinct, records [n,
        floats], t uint32 [n]. After a StorageError the store holds all of them or none."""
        keys = as_keys(keys)
        words = as_words(np.ascontiguousarray(records), self.layout)
        self.write(keys, t, np.arange(len(keys)), words, words, np.full(len(keys), -1, np.int64))
        self.tidy()

    def write(self, keys: np.ndarray, t: np.ndarray, positions: np.ndarray, first: np.ndarray,
              second: np.ndarray, old: np.ndarray) -> np.ndarray:
        """As ``put`` without ``tidy``, for the tiers above: row i's record is ``first[positions[i]]``, or
        ``second[-1 - p]`` for a negative position p (uint32 [*, >= W]). ``old`` int64 [n]: where the caller
        once saw the key's row (by ``fetch`` or ``write``), -1 where it does not know; what it knows need not
        be read again. Returns the new locations int64 [n]."""
        self.check_writable()
        n = len(keys)
        if n == 0:
            return np.empty(0, np.int64)
        order = np.argsort(keys)
        keys, t, positions = keys[order], np.asarray(t, np.uint32)[order], positions[order]
        if (keys[1:] == keys[:-1]).any():
            raise ValueError("the keys of a put must be distinct")
        result = np.empty(n, np.int64)
        old, claimed = self._settle(keys, old[order], may_claim=True)
        result[order] = self._append(keys, t, positions, first, second, old, claimed)
        return result

    def delete(self, keys: np.ndarray, old: np.ndarray | None = None) -> np.ndarray:
        """Delete the rows of ``keys`` uint64 [n] distinct, durably, as one new segment; keys without a row are left
        out. ``old`` as for ``write``. Returns whether each had a row, bool [n]; after a StorageError all rows are there
        still. Needs a layout with a lifecycle; ``tidy`` is the caller's."""
        self.check_writable()
        order = np.argsort(keys)
        keys = as_keys(keys)[order]
        old, _ = self._settle(keys, np.full(len(keys), -1, np.int64) if old is None else old[order], may_claim=False)
        there = (old >= 0) & ~self._are_deletions(old)
        result = np.empty(len(keys), np.bool_)
        result[order] = there
        keys, old = keys[there], old[there]
        if len(keys):
            nothing = np.zeros((1, self.layout.words), np.uint32)
            zeros = np.zeros(len(keys), np.int64)
            self._append(keys, zeros.astype(np.uint32), zeros, nothing, nothing, old, zeros > 0, deletions=True)
        return result

    def _append(self, keys, t, positions, first, second, old, claimed, deletions=False) -> np.ndarray:
        """Write and commit one segment of rows sorted by key, with settled ``old``, of which ``claimed`` bool [n] were
        not compared; returns their locations."""
        n, fresh = len(keys), old < 0
        self.index.reserve(keys[fresh])
        number, writer = self.write_segment(n, deletions)
        with writer:
            while writer.room:
                begin = writer.written
                rows = writer.space()
                end = begin + len(rows)
                pack_rows(rows, keys[begin:end], t[begin:end], positions[begin:end], first, second)
                writer.advance(len(rows))
            digest, _ = writer.finish()
        superseded = int(np.count_nonzero(self._are_deletions(old))) if self._deleted else 0
        owner = self._owners(old[claimed])
        doubtful = tuple(self._segments[i] for i in np.unique(owner))
        added = self.commit(number, digest, self.count_by_segment(old[~fresh]), doubtful)
        self._deleted += n * deletions - superseded
        new = added.base + np.arange(n)
        with self.index.lock:  # a rewrite in the background sees claims and entries change together
            for segment, part in zip(doubtful, _split_by(owner)):
                here = np.flatnonzero(claimed)[part]
                self.claims.add(segment.number, old[here] - segment.base, keys[here])
            self.index.move(keys, old, new)
        self.index.add(keys, new, fresh)
        return new

    def _settle(self, keys: np.ndarray, old: np.ndarray, may_claim: bool) -> tuple[np.ndarray, np.ndarray]:
        """Present location of each key or of its deletion, -1 where it has none: ``old`` where that still holds, else
        by reading; and where it was claimed instead, bool [n]: the only entry that matches was taken, unread."""
        settled = np.full(len(keys), -1, np.int64)
        noted = np.flatnonzero(old >= 0)
        noted = noted[self.index.has(keys[noted], old[noted])]
        settled[noted] = old[noted]
        claimed = np.zeros(len(keys), np.bool_)
        unknown = np.flatnonzero(settled < 0)
        first, alone = self.index.find_alone(keys[unknown])
        matched = first >= 0
        maybe, first, alone = unknown[matched], first[matched], alone[matched]
        if may_claim and 0 < len(maybe) <= self.claims.room:
            # nor may anything else in this put have a right to the entry: a key like it, or one whose place is known
            taken, times = np.unique(np.concatenate([first, settled[settled >= 0]]), return_counts=True)
            alone &= ~np.isin(first, taken[times > 1])
            settled[maybe[alone]], claimed[maybe[alone]] = first[alone], True
            maybe = maybe[~alone]
        settled[maybe] = self._entries(keys[maybe])[1]
        return settled, claimed

    def _owners(self, locations: np.ndarray) -> np.ndarray:
        """Which segment, in the order of ``segments()``, each location lies in."""
        return np.searchsorted(self.segment_map.bases, locations, side="right") - 1

    def count_by_segment(self, locations: np.ndarray) -> np.ndarray:
        """How many of the locations are in each segment, int64 [segments]."""
        return np.bincount(self._owners(locations), minlength=len(self._segments))

    def supersede(self, locations: np.ndarray) -> None:
        """Count the rows at these places as stale."""
        for segment, count in zip(self._segments, self.count_by_segment(locations), strict=True):
            segment.live -= int(count)

    def tidy(self) -> None:
        """Rewrite segments that are mostly stale, merge the smallest when there are too many, and drop deletions that
        are not needed any more."""
        tidy(self)

    def compact(self) -> None:
        """Rewrite every segment that has stale rows."""
        compact_all(self)

    def finish(self) -> None:
        """Wait for what goes on in the background, and take it over."""
        finish_rewrite(self)

    @property
    def deleted(self) -> int:
        """Entries of the index that are deletions."""
        return self._deleted

    def drop_deletions(self, segments: list[Segment]) -> None:
        """Commit the state without segments of deletions that nothing needs any more."""
        self.check_writable()
        keys, locations = [], []
        for segment in segments:
            cursor = Cursor(segment.file, self.options.read_bytes)
            while len(cursor.rows):
                at = segment.base + cursor.first_row + np.arange(len(cursor.keys))
                live = self.index.has(cursor.keys, at)
                keys.append(cursor.keys[live])
                locations.append(at[live])
                cursor.skip(len(cursor.rows))
                cursor.refill()
        for segment in segments:
            self.claims.drop(segment.number)
        self._commit([0 if s in segments else s.live for s in self._segments], None, ())
        self._deleted -= self.index.remove(np.concatenate(keys), np.concatenate(locations))

    # --- checking and closing

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Read everything and say what is damaged, one sentence each; an empty list when nothing is."""
        return recovery.verify(self.directory, progress)

    def close(self) -> None:
        """Close all files; more than once does no harm. What is under way in the background is given up."""
        if self.rewriting is not None:
            self.rewriting.cancel()
            self.rewriting = None
        for segment in self._segments:
            segment.file.close()
        self._refusal = f"the store {self.directory} is closed"
        if self._lock >= 0:
            fs.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "ColdStore":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _split_by(owner: np.ndarray) -> list[np.ndarray]:
    """Positions of each distinct value of ``owner``, by value."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)
