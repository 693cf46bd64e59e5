"""Copying the live rows of some segments into new ones, in a thread of its own, while the store is read and written.

The thread only reads the victims' files and the index and writes files that nobody knows yet. Rows may be overwritten,
deleted or claimed (storage/claims.py) meanwhile: what it copied counts only where, at the end, the index still points at
the place that it was copied from. The thread that uses the store then commits the new files and moves the index
(storage/compact.py). Numbers and locations of the new segments are taken at the beginning, so that whatever is put
meanwhile comes after them, in the files' order too: where a key is in several files the later one holds its row.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_ctr.kernels.rows import copy_rows
from hpc_ctr.storage import fs
from hpc_ctr.storage.segment import Cursor, Part, SegmentWriter, merge

if TYPE_CHECKING:
    from hpc_ctr.storage.cold import ColdStore, Segment

_LEAST_BUFFER = 1 << 16


@dataclass(frozen=True)
class Output:
    """A finished segment that is not committed yet: number, location of its first row, digest; and of its rows, in
    order, keys uint64 [n] and the locations that they were copied from, int64 [n]; by_place [n]: what sorts those."""

    number: int
    base: int
    digest: str
    keys: np.ndarray
    old: np.ndarray
    by_place: np.ndarray


class Rewrite:
    """The copying of ``victims``, segments of rows, into segments of up to ``limit`` rows.

    It is under way from the beginning; ``outputs`` waits for its end. ``victims`` must stay open until then.
    """

    def __init__(self, store: "ColdStore", victims: list["Segment"], limit: int):
        self.victims = victims
        # keys of rows whose entry another key has claimed, as far as that was seen while copying
        self.contested = [np.empty(0, np.uint64)]
        self._store, self._limit = store, limit
        self._left = sum(segment.live for segment in victims)
        files = -(-self._left // limit)
        self._numbers = store.take_numbers(files)
        self._base = store.take_locations(self._left)
        self._outputs: list[Output] = []
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpc_ctr-rewrite", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether ``outputs`` need not wait."""
        return not self._thread.is_alive()

    def outputs(self) -> list[Output]:
        """What was written, in order. Raises what went wrong, and then nothing of it is left."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return list(self._outputs)

    def cancel(self) -> None:
        """End it and remove what it wrote, unless that was committed."""
        self._stop.set()
        self._thread.join()
        self._discard()

    def _discard(self) -> None:
        for output in self._outputs:
            fs.remove_quietly(self._store.path_of(output.number))
        self._outputs = []

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as error:  # it belongs to the thread that waits for the outputs
            self._discard()
            self._error = error

    def _copy(self) -> None:
        cursors = open_cursors(self._store, self.victims)
        writer: SegmentWriter | None = None
        moved: list[tuple[np.ndarray, np.ndarray]] = []
        try:
            for parts in merge(cursors):
                if self._stop.is_set():
                    return
                keys, old, sources = self._live(parts)
                # rows that got their entry back meanwhile may be more than were live: they stay where they are
                keys, old, sources = keys[:self._left], old[:self._left], sources[:self._left]
                begin = 0
                while begin < len(keys):
                    if writer is None:
                        number = self._numbers[len(self._outputs)]
                        writer = self._store.writer(number, min(self._limit, self._left))
                    count = append(writer, sources[begin:])
                    moved.append((keys[begin:begin + count], old[begin:begin + count]))
                    begin += count
                    self._left -= count
                    if not writer.room:
                        self._finish(writer, moved)
                        writer, moved = None, []
                if not self._left and not any(victim.number in self._store.claims for victim in self.victims):
                    return
            if writer is not None:
                writer.shorten()
                self._finish(writer, moved)
                writer = None
        finally:
            if writer is not None:
                writer.abort()

    def _live(self, parts: list[Part]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As ``live_rows``, the claims on the rows compared."""
        with self._store.index.lock:  # a put changes claims and entries together
            for part in parts:
                victim = self.victims[part.cursor]
                rows, claimants = self._store.claims.among(victim.number, part.first_row, len(part.keys))
                keys = part.keys[rows]
                self.contested.append(keys[keys != claimants])
            return live_rows(self._store, self.victims, parts)

    def _finish(self, writer: SegmentWriter, moved: list[tuple[np.ndarray, np.ndarray]]) -> None:
        keys, old = (np.concatenate(column) for column in zip(*moved, strict=True))
        digest, _ = writer.finish()
        self._outputs.append(Output(self._numbers[len(self._outputs)], self._base, digest, keys, old, np.argsort(old)))
        self._base += len(keys)


def open_cursors(store: "ColdStore", victims: list["Segment"]) -> list[Cursor]:
    """Cursors over segments, for ``merge``; together they take about ``scan_bytes`` of memory."""
    share = max(store.options.scan_bytes // len(victims), _LEAST_BUFFER)
    return [Cursor(segment.file, share) for segment in victims]


def live_rows(store: "ColdStore", victims: list["Segment"], parts: list[Part]
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Those rows of a step of ``merge`` that are live, ascending by key: keys uint64 [n], locations int64 [n], addresses
    of the stored rows in memory uint64 [n]."""
    keys, old, sources = [], [], []
    for part in parts:
        where = victims[part.cursor].base + part.first_row + np.arange(len(part.keys))
        live = np.flatnonzero(store.index.has(part.keys, where))
        keys.append(part.keys[live])
        old.append(where[live])
        sources.append(np.uint64(part.rows.ctypes.data) + (live * part.rows.strides[0]).astype(np.uint64))
    keys = np.concatenate(keys)
    order = np.argsort(keys, kind="stable")  # which is quick where a few ascending parts follow each other
    return keys[order], np.concatenate(old)[order], np.concatenate(sources)[order]


def append(writer: SegmentWriter, sources: np.ndarray) -> int:
    """Copy stored rows to a segment, as many as it has room for; returns how many. sources: addresses, uint64 [n]."""
    total = min(len(sources), writer.room)
    done = 0
    while done < total:
        space = writer.space()[:total - done]
        copy_rows(sources[done:done + len(space)], space)
        writer.advance(len(space))
        done += len(space)
    return total
