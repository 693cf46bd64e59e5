"""A table's rows on one rank: host memory first, segment files on SSD below, within one byte budget.

Which tier a row is in shows in nothing but speed and counters.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import cold_index, host_cache, recovery
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.host_cache import DIRTY, EVICT_SHARE, FLOOR_ROWS, LIVE, HostCache
from hpc_ctr.storage.record import RecordLayout, as_keys, as_words
from hpc_ctr.storage.scan import Progress
from hpc_ctr.storage.segment import LAST_KEY, SegmentInfo, live_rows
from hpc_ctr.storage.staging import Staging
from hpc_ctr.units import format_bytes

# of the budget: half for notes of where rows lie that were read but not cached, half for rows overwritten unread
_HINT_SHARE = 32
_HINT_BYTES = 16
_WRITE_ROWS = 65536         # rows of one segment of an eviction or flush (an eighth of the cache when more)
_LOAD_ROWS = 262144
_LEAST_SCAN = 1 << 20        # buffers come on top of the budget, and are small where it is small
_DELETE_ROWS = 1 << 20


@dataclass(frozen=True)
class StorageOptions:
    """Section ``storage`` of a job file.

    dir: directory for segment files, on a local SSD; each rank and table has its own below it ("" = ``store``
    in the run directory). host_budget: bytes of host memory of a rank for rows, of all tables together, or
    "auto".
    """

    dir: str = ""
    host_budget: int | str = "auto"


@dataclass
class StoreCounters:
    """Rows served by each tier and bytes moved, since the store was opened."""

    host_hits: int = 0
    cold_hits: int = 0
    missing: int = 0
    rows_evicted: int = 0
    segments_written: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    rows_staged: int = 0


def budget_for(layout: RecordLayout, cached_rows: int, total_rows: int) -> int:
    """The budget in bytes with which a table of ``total_rows`` keeps ``cached_rows`` in host memory."""
    need = cold_index.bytes_for(total_rows) + host_cache.bytes_for(cached_rows, layout)
    return -(-need * _HINT_SHARE // (_HINT_SHARE - 1)) + 1


class TieredStore:
    """Rows by key, in host memory and on disk, of one table on one rank. One thread uses it.

    directory: of this table and rank alone; layout: of its rows; budget_bytes: for everything that the store
    keeps in memory (cached rows and their index, the index of the cold tier); name: the table's; progress: called while
    it opens, with bytes read so far and bytes in all. Leaving a
    ``with`` block without an error flushes; ``close`` alone does not. Raises StorageError: names
    storage.host_budget when the budget cannot hold the indexes, the file when one is damaged.
    """

    def __init__(self, directory: str, layout: RecordLayout, budget_bytes: int, name: str = "default",
                 options: ColdStoreOptions | None = None, progress: Progress | None = None):
        self.layout, self.name, self.budget = layout, name, int(budget_bytes)
        options = options or ColdStoreOptions()
        scan = min(options.scan_bytes, max(_LEAST_SCAN, self.budget // 64))
        self.cold = ColdStore(directory, layout, name, replace(options, scan_bytes=scan), progress)
        self._host_hits = self._cold_hits = self._missing = self._rows_evicted = 0
        self._noted_keys, self._noted_locations = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._last_was_put = False
        self._rows_staged = 0
        self._staging: Staging | None = None
        self._next_keys = np.empty(0, np.uint64)
        try:
            self.cache = HostCache(layout, self._capacity(self.cold.entries))
        except BaseException:
            self.cold.close()
            raise
        self.cold.on_move = self._on_move
        self.cold.limit_claims(self.budget // _HINT_SHARE // 2)

    @classmethod
    def restore(cls, directory: str, segments: Sequence[str | SegmentInfo], layout: RecordLayout,
                budget_bytes: int, name: str = "default", options: ColdStoreOptions | None = None,
                progress: Progress | None = None) -> "TieredStore":
        """A store of exactly these segments; where a key is in several, the last in this order wins.

        The files are hard-linked, or copied from another file system; digests are checked where given. What
        ``directory`` held before is dropped.
        """
        recovery.adopt(directory, layout, list(segments), name, progress)
        return cls(directory, layout, budget_bytes, name, options, progress)

    def load(self, segments: Sequence[str | SegmentInfo], first_key: int = 0,
             last_key: int = LAST_KEY) -> int:
        """Put the rows of segments whose keys are from ``first_key`` to ``last_key``; returns how many.

        For another rank count: a rank's shards are one range of keys, and only that part of the files is
        read.
        """
        paths = [s.path if isinstance(s, SegmentInfo) else s for s in segments]
        total = 0
        for keys, records, t in live_rows(paths, _LOAD_ROWS, first_key, last_key, self.layout):
            self.put(keys, records, t)
            total += len(keys)
        return total

    # --- memory

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use; never above the budget after an operation."""
        return self.cold.nbytes + self.cache.nbytes + self._noted_keys.nbytes + self._noted_locations.nbytes

    def _room(self, total_rows: int) -> int:
        """Rows that the budget leaves to the cache when the store has ``total_rows``; too few, perhaps."""
        room = self.budget - self.budget // _HINT_SHARE - cold_index.bytes_for(total_rows)
        return host_cache.capacity_for(room, self.layout)

    def _capacity(self, total_rows: int) -> int:
        """Rows that the cache may hold when the store has ``total_rows``, all of which may sink one day."""
        capacity = self._room(total_rows)
        if capacity < FLOOR_ROWS:
            need = budget_for(self.layout, FLOOR_ROWS, total_rows)
            raise StorageError(f"storage.host_budget: {format_bytes(self.budget)} is too little for table "
                               f"{self.name!r} with {total_rows} rows on this rank: the index of its cold "
                               f"rows and the smallest cache need {format_bytes(need)}")
        return capacity

    def _backed(self) -> np.ndarray:
        """For each slot that was ever used, whether it is free or known to be in the cold tier."""
        cache = self.cache
        return (cache.cold[:cache.high] >= 0) | (cache.flags[:cache.high] == 0)

    def _most_rows(self) -> int:
        """Entries that the cold tier's index may come to, rows not known to be in it counted as new ones."""
        return self.cold.entries + int(np.count_nonzero(~self._backed()))

    def _fit(self, keys: np.ndarray, locations: np.ndarray) -> None:
        """Shrink the cache to what the budget leaves when ``keys`` are in the store as well.

        ``locations``: where the cold tier has their rows, -1 where that is not known; filled in when it
        matters.
        """
        arriving = int(np.count_nonzero(locations < 0))
        capacity = self._room(self._most_rows() + arriving)
        if capacity < max(self.cache.count, FLOOR_ROWS):
            # rows that may be old were counted as new: look before others are evicted, or the put is refused
            unknown = np.flatnonzero(locations < 0)
            locations[unknown] = self.cold.locate(keys[unknown])
            self._unbacked()
            arriving = int(np.count_nonzero(locations < 0))
            capacity = self._capacity(self._most_rows() + arriving)
        if capacity >= self.cache.capacity:
            return
        if self.cache.count > capacity:
            self.cache.unpin()
            self._evict(self.cache.coldest(max(self.cache.count - capacity, capacity // EVICT_SHARE)))
        self.cache.resize(capacity)

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; a smaller one takes effect at once, by eviction."""
        self._settle_staging()
        before, self.budget = self.budget, int(budget_bytes)
        self._forget_notes()
        self.cold.limit_claims(self.budget // _HINT_SHARE // 2)
        try:
            self._unbacked()
            self._fit(np.empty(0, np.uint64), np.empty(0, np.int64))
        except StorageError:
            self.budget = before
            raise
        self.cache.resize(self._capacity(self._most_rows()))
        self.cold.tidy()

    # --- rows

    def get(self, keys: np.ndarray, records: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Read rows: ``keys`` uint64 [n] distinct -> ``records`` [n, floats] and ``t`` uint32 [n] filled in.

        With a lifecycle ``records`` here and below are rows as RecordLayout says.

        Returns found bool [n]; rows that were not found are left untouched, and none is made. Rows from the
        cold tier move into the cache where they are at least as warm as what is there. Raises StorageError
        naming file and row when a row is damaged.
        """
        keys = as_keys(keys)
        if not records.flags.c_contiguous:
            copy = records.copy()
            found = self.get(keys, copy, t)
            records[...] = copy
            return found
        words = as_words(records, self.layout)
        self.cache.now += 1
        self._last_was_put = False
        self._forget_notes()
        slots = self.cache.lookup(keys)
        self.cache.read(slots, np.arange(len(keys)), words, t)
        self.cache.touch(slots)
        found = slots >= 0
        absent = np.flatnonzero(~found)
        there, locations = self._fetch(keys[absent], absent, words, t)
        rows, locations = absent[there], locations[there]
        found[rows] = True
        self._host_hits += len(keys) - len(absent)
        self._cold_hits += len(rows)
        self._missing += len(absent) - len(rows)
        try:
            admitted = self._make_room(len(rows))
        except StorageError:
            # changed rows could not leave the cache (the disk is full, say). What was read is right all the
            # same, and the next put or flush meets the error again
            admitted = 0
        self.cache.insert(keys[rows[:admitted]], rows[:admitted], words, t, locations[:admitted], dirty=False)
        self._note(keys[rows[admitted:]], locations[admitted:])
        # tidying up is the writers' business: a put that cannot do it raises
        with contextlib.suppress(StorageError):
            self.cold.tidy()
        return found

    def has(self, keys: np.ndarray) -> np.ndarray:
        """Whether ``keys`` uint64 [n] have rows, bool [n]; changes nothing. Reads the cold rows that may be theirs."""
        found = self.cache.lookup(keys) >= 0
        absent = np.flatnonzero(~found)
        found[absent] = self.cold.locate(keys[absent]) >= 0
        return found

    def put(self, keys: np.ndarray, records: np.ndarray, t: np.ndarray) -> None:
        """Insert or overwrite rows: ``keys`` uint64 [n] distinct, ``records`` [n, floats], ``t`` uint32 [n].

        Rows are dirty in the cache until ``flush`` or eviction; what the cache cannot take goes to the cold
        tier at once, as one segment. After a StorageError some of the rows may be stored and others not.
        """
        keys = as_keys(keys)
        words = as_words(np.ascontiguousarray(records), self.layout)
        t = np.ascontiguousarray(t, np.uint32)
        self._settle_staging()
        if self._last_was_put:
            self.cache.now += 1     # a get and the put that follows it are one use
        self._last_was_put = True
        slots = self.cache.lookup(keys)
        self.cache.write(slots, np.arange(len(keys)), words, t)
        self.cache.touch(slots)
        new = np.flatnonzero(slots < 0)
        if len(new) == 0:
            return
        # the cache takes the first ones: those that the next pass wants
        wanted = _among(self._next_keys, keys[new])
        new = np.concatenate([new[wanted], new[~wanted]])
        locations = self._look_up_notes(keys[new])
        self._fit(keys[new], locations)
        admitted = self._make_room(len(new), keys, words, t, new, locations)
        new = new[:admitted]
        self.cache.insert(keys[new], new, words, t, locations[:admitted], dirty=True)
        self.cache.pin(keys[new[:np.count_nonzero(wanted)]])
        self.cold.tidy()

    # --- looking ahead

    def stage(self, keys: np.ndarray, limit: int) -> None:
        """Get ready for a ``get`` of ``keys`` uint64 [n] distinct, the next one of a pass: begin to read their cold
        rows, up to ``limit`` of them, in the background, and keep those that are in the cache there. Changes no result;
        it holds until ``unstage`` or the next call."""
        self.unstage()
        if not self.cold.rows:  # nothing to read, and nothing was ever evicted
            return
        self._next_keys = np.sort(as_keys(keys))
        slots = self.cache.lookup(self._next_keys)
        self.cache.pin_slots(slots[slots >= 0])
        self._staging = Staging(self.cold, self._next_keys[slots < 0], limit, _background(os.getpid()))

    @property
    def staged_bytes(self) -> int:
        """Bytes of memory that ``stage`` holds; not part of ``nbytes``."""
        return self._next_keys.nbytes + (self._staging.nbytes if self._staging else 0)

    def _fetch(self, keys: np.ndarray, targets: np.ndarray, words: np.ndarray, t: np.ndarray
               ) -> tuple[np.ndarray, np.ndarray]:
        """As ColdStore.fetch; what is staged need not be read."""
        if self._staging is None:
            return self.cold.fetch(keys, targets, words, t)
        found, locations = self._staging.serve(keys, targets, words, t)
        self._rows_staged += int(np.count_nonzero(found))
        rest = np.flatnonzero(~found)
        found[rest], locations[rest] = self.cold.fetch(keys[rest], targets[rest], words, t)
        return found, locations

    def _settle_staging(self) -> None:
        """Before segments may go."""
        if self._staging is not None:
            self._staging.wait()

    def unstage(self) -> None:
        """Forget what ``stage`` prepared: the pass that wanted it has its rows."""
        try:
            self._settle_staging()
        finally:
            self._staging, self._next_keys = None, np.empty(0, np.uint64)
            self.cache.unpin()

    def _make_room(self, arriving: int, keys=None, words=None, t=None, rows=None, locations=None) -> int:
        """Evict for ``arriving`` rows; returns how many of them (the first ones) the cache takes.

        The others, when they are given, go to the cold tier together with what is evicted.
        """
        free = self.cache.capacity - self.cache.count
        if arriving <= free:
            return arriving
        replaceable = self.cache.replaceable()
        admitted = min(arriving, free + replaceable)
        evicted = min(max(admitted - free, self.cache.capacity // EVICT_SHARE), replaceable)
        victims = self.cache.coldest(evicted)
        if rows is None:
            self._evict(victims)
        else:
            over = rows[admitted:]
            self._evict(victims, keys[over], t[over], -1 - over, words, locations[admitted:])
        return admitted

    def _evict(self, victims: np.ndarray, keys=None, t=None, positions=None, words=None,
               locations=None) -> None:
        """Drop slots from the cache, dirty ones to a new segment; with them rows that were never in the
        cache."""
        cache = self.cache
        dirty = victims[(cache.flags[victims] & DIRTY) != 0]
        if keys is None:
            keys, t, words = np.empty(0, np.uint64), np.empty(0, np.uint32), cache.slab
            positions = locations = np.empty(0, np.int64)
        step = max(_WRITE_ROWS, cache.capacity // 8)
        for begin in range(0, len(dirty), step):
            slots = dirty[begin:begin + step]
            last = begin + step >= len(dirty)
            count = len(keys) if last else 0
            self.cold.write(np.concatenate([cache.keys[slots], keys[:count]]),
                            np.concatenate([cache.t[slots], t[:count]]),
                            np.concatenate([slots, positions[:count]]), cache.slab, words,
                            np.concatenate([cache.cold[slots], locations[:count]]))
        if not len(dirty):
            self.cold.write(keys, t, positions, cache.slab, words, locations)
        cache.drop(victims)
        self._rows_evicted += len(victims)

    def flush(self) -> None:
        """Commit every dirty row to the cold tier; the cache keeps them, clean."""
        self._settle_staging()
        cache = self.cache
        dirty = cache.slots_where(LIVE | DIRTY)
        step = max(_WRITE_ROWS, cache.capacity // 8)
        for begin in range(0, len(dirty), step):
            slots = dirty[begin:begin + step]
            cache.cold[slots] = self.cold.write(cache.keys[slots], cache.t[slots], slots, cache.slab,
                                                cache.slab, cache.cold[slots])
            cache.flags[slots] &= 255 - DIRTY
        self.cold.tidy()

    def delete(self, keys: np.ndarray) -> int:
        """Delete the rows of ``keys`` uint64 [n] distinct, in all tiers; returns how many there were.

        Needs a layout with a lifecycle. What the cold tier has is deleted durably, at once. After a StorageError no row
        is gone.
        """
        self._settle_staging()
        keys = as_keys(keys)
        self._forget_notes()
        slots = self.cache.lookup(keys)
        cached = slots >= 0
        gone = self.cold.delete(keys, np.where(cached, self.cache.cold[slots], -1))
        self.cache.drop(slots[cached])
        self.cache.pack()
        return int(np.count_nonzero(gone | cached))

    def shrink(self, now: int, due: Callable[[np.ndarray], np.ndarray],
               each: Callable[[np.ndarray], None] | None = None) -> int:
        """Delete every row that is due by ``now``; returns how many there were.

        due: of LIFE [n], the sample count from which each row is to go, int64 [n], LATER where it is to stay; always
        the same for the same row. each: called with the LIFE [m] of rows that are deleted. Reads, one after the other,
        the segments that may hold such rows. After a StorageError some rows may be gone and others not.
        """
        self._settle_staging()
        cache, count = self.cache, 0
        for begin in reversed(range(0, cache.high, _DELETE_ROWS)):  # backwards: a deletion moves the last rows down
            part = slice(begin, min(begin + _DELETE_ROWS, cache.high))
            life = self.layout.life(cache.slab[part])
            victims = np.flatnonzero(((cache.flags[part] & LIVE) != 0) & (due(life) <= now))
            if len(victims):
                life = life[victims]
                count += self.delete(cache.keys[begin + victims])
                if each:
                    each(life)
        for keys, locations, life in self.cold.due_rows(now, due):
            alone = cache.lookup(keys) < 0  # of the others the cache has the newer life
            count += int(np.count_nonzero(self.cold.delete(keys[alone], locations[alone])))
            if each and alone.any():
                each(life[alone])
        self._forget_notes()
        self.cold.tidy()
        return count

    # --- notes: where rows lie that a get read and the cache did not take, so that the put need not read them
    # again

    def _note(self, keys: np.ndarray, locations: np.ndarray) -> None:
        limit = self.budget // _HINT_SHARE // 2 // _HINT_BYTES
        order = np.argsort(keys[:limit])
        self._noted_keys, self._noted_locations = keys[:limit][order], locations[:limit][order]

    def _forget_notes(self) -> None:
        self._note(np.empty(0, np.uint64), np.empty(0, np.int64))

    def _look_up_notes(self, keys: np.ndarray) -> np.ndarray:
        if not len(self._noted_keys):
            return np.full(len(keys), -1, np.int64)
        place = np.minimum(np.searchsorted(self._noted_keys, keys), len(self._noted_keys) - 1)
        return np.where(self._noted_keys[place] == keys, self._noted_locations[place], -1)

    def _on_move(self, keys: np.ndarray, old: np.ndarray, locations: np.ndarray) -> None:
        if self._staging is not None:
            self._staging.moved(keys, old, locations)
        slots = self.cache.lookup(keys)
        self.cache.cold[slots[slots >= 0]] = locations[slots >= 0]

    # --- the whole table

    def _unbacked(self) -> np.ndarray:
        """Slots of rows that are nowhere but in the cache."""
        slots = np.flatnonzero(~self._backed())
        self.cache.cold[slots] = self.cold.locate(self.cache.keys[slots])
        return slots[self.cache.cold[slots] < 0]

    @property
    def rows(self) -> int:
        """Number of live rows in all tiers."""
        return self.cold.rows + len(self._unbacked())

    def __len__(self) -> int:
        return self.rows

    def iterate(self, batch_rows: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Every live row once: (keys uint64 [m], records [m, floats], t uint32 [m]) with m <= batch_rows.

        Segment by segment, in key order within each, then the rows that are in the cache alone. Nothing is
        changed; the store must not be written to meanwhile.
        """
        self._settle_staging()
        for keys, records, t in self.cold.iterate(batch_rows):
            self.cache.read(self.cache.lookup(keys), np.arange(len(keys)), as_words(records, self.layout), t)
            yield keys, records, t
        slots = self._unbacked()
        slots = slots[np.argsort(self.cache.keys[slots])]
        for begin in range(0, len(slots), batch_rows):
            part = slots[begin:begin + batch_rows]
            records = self.layout.empty(len(part))
            t = np.empty(len(part), np.uint32)
            self.cache.read(part, np.arange(len(part)), as_words(records, self.layout), t)
            yield self.cache.keys[part], records, t

    def segments(self) -> list[SegmentInfo]:
        """The committed segments, oldest first, as a checkpoint takes them; call ``flush`` before."""
        return self.cold.segments()

    def counters(self) -> StoreCounters:
        """What each tier has served, and the traffic to disk."""
        done = self.cold.counters
        return StoreCounters(self._host_hits, self._cold_hits, self._missing, self._rows_evicted,
                             done.segments_written, done.bytes_written, done.bytes_read, self._rows_staged)

    def verify(self) -> list[str]:
        """Read all committed segments and say what is damaged, one sentence each."""
        return self.cold.verify()

    def _unstage_quietly(self) -> None:
        with contextlib.suppress(StorageError):
            self.unstage()

    def close(self) -> None:
        """Close the files. Rows that were not flushed are lost."""
        self._unstage_quietly()
        self.cold.close()

    def __enter__(self) -> "TieredStore":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


def _among(ascending: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which of ``keys`` are in ``ascending``, bool [n]."""
    if not len(ascending):
        return np.zeros(len(keys), np.bool_)
    return ascending[np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)] == keys


@lru_cache(maxsize=2)
def _background(process: int) -> ThreadPoolExecutor:
    """The thread that waits for staged reads; a forked child makes its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="hpc_ctr-stage")
