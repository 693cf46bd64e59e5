"""Rewriting segments of the cold tier, so that superseded rows give their disk space back."""

from typing import TYPE_CHECKING

import numpy as np

from hpc_ctr.storage.segment import Cursor, SegmentWriter, merge

if TYPE_CHECKING:
    from hpc_ctr.storage.cold import ColdStore, Segment


def compact(store: "ColdStore", victims: list["Segment"], limit: int) -> None:
    """Write the live rows of ``victims`` into new segments of up to ``limit`` rows, and drop the victims.

    The victims are all segments of rows, or all of deletions.
    Each new segment is committed as soon as it is complete: a crash or an error in between loses nothing, and
    rows that were moved are served from their new place.
    """
    left = sum(segment.live for segment in victims)
    # rows that were overwritten unread may turn out to be live: then everything has to be read to the end
    doubtful = any(segment.number in store.claims for segment in victims)
    if not left and not doubtful:
        store.drop_dead()
        return
    cursors = [Cursor(s.file, max(store.options.scan_bytes // len(victims), 1 << 16)) for s in victims]
    writer: SegmentWriter | None = None
    number, moved = 0, []
    try:
        for parts in merge(cursors):
            if doubtful and any([store.compare_claims(victims[part.cursor], part.first_row, part.keys)
                                 for part in parts]):
                left = sum(segment.live for segment in victims) - sum(len(keys) for keys, _ in moved)
            keys, old, rows = [], [], []
            for part in parts:
                where = victims[part.cursor].base + part.first_row + np.arange(len(part.keys))
                live = store.index.has(part.keys, where)
                keys.append(part.keys[live])
                old.append(where[live])
                rows.append(part.rows[live])
            keys, old, rows = np.concatenate(keys), np.concatenate(old), np.concatenate(rows)
            order = np.argsort(keys)
            begin = 0
            while begin < len(order):
                if writer is None:
                    number, writer = store.write_segment(min(limit, left), victims[0].deletions)
                chosen = order[begin:begin + writer.room]
                writer.append(rows[chosen])
                moved.append((keys[chosen], old[chosen]))
                begin += len(chosen)
                left -= len(chosen)
                if not writer.room:
                    digest, _ = writer.finish()
                    writer = None
                    _adopt_output(store, number, digest, moved, victims if left or doubtful else [])
                    moved = []
            if not left and not doubtful:
                return
        for segment in victims:
            store.claims.drop(segment.number)
        store.drop_dead()
    finally:
        if writer is not None:
            writer.abort()


def _adopt_output(store: "ColdStore", number: int, digest: str, moved: list, keep: list["Segment"]) -> None:
    keys = np.concatenate([keys for keys, _ in moved])
    old = np.concatenate([old for _, old in moved])
    # victims that have nothing live left are still being read until the last of them is through
    added = store.commit(number, digest, store.count_by_segment(old), tuple(keep))
    new = added.base + np.arange(len(keys))
    store.index.move(keys, old, new)
    store.counters.rows_compacted += len(keys)
    if store.on_move is not None and not added.deletions:
        store.on_move(keys, old, new)


def tidy(store: "ColdStore") -> None:
    """See ColdStore.tidy."""
    limit = _limit(store)
    for deletions in (False, True):
        while _rewrite(store, limit, deletions):
            pass
    if store.deleted:
        purge(store, limit)


def compact_all(store: "ColdStore") -> None:
    """See ColdStore.compact."""
    limit = _limit(store)
    for deletions in (False, True):
        if stale := [s for s in store.segments_of(deletions) if s.live < s.file.rows]:
            compact(store, stale, limit)


def _rewrite(store: "ColdStore", limit: int, deletions: bool) -> bool:
    """Rewrite one group of segments of rows, or of deletions; False when there was nothing to do."""
    segments = store.segments_of(deletions)
    rows, live = sum(s.file.rows for s in segments), sum(s.live for s in segments)
    share = store.options.stale_share
    stale = [s for s in segments if not s.live]
    if not stale and rows - live > share * rows:
        # the most stale first: they give back the most for what is copied, and those that are left go on to decay
        stale = sorted((s for s in segments if s.live < s.file.rows * (1 - share / 2)),
                       key=lambda s: (s.live / s.file.rows, s.number))
    elif not stale and len(segments) > store.options.max_segments:
        by_size = sorted(segments, key=lambda s: (s.live, s.number))
        stale = [s for s in by_size[:len(by_size) * 3 // 4] if s.live <= limit // 2]
    group = _first_of(stale, limit)
    if not group or (len(group) == 1 and group[0].live == group[0].file.rows):
        return False
    compact(store, group, limit)
    return True


def purge(store: "ColdStore", limit: int) -> None:
    """Drop deletions that no older segment needs; when they are many, rewrite the older segments first."""
    while True:
        rows = [s.number for s in store.segments_of(False)]
        spent = [s for s in store.segments_of(True) if s.number < min(rows, default=s.number + 1)]
        if spent:
            store.drop_deletions(spent)
        if store.deleted <= max(store.rows // 4, store.options.output_rows // 16):
            return
        newest = max(s.number for s in store.segments_of(True))
        older = _first_of(sorted((s for s in store.segments_of(False) if s.number < newest),
                                 key=lambda s: s.number), limit)
        compact(store, older, limit)


def _first_of(segments: list["Segment"], limit: int) -> list["Segment"]:
    """The first of them with up to ``limit`` live rows together, at least one: the disk holds the old and the new form
    of what is rewritten at once."""
    group: list[Segment] = []
    for segment in segments:
        if group and sum(s.live for s in group) + segment.live > limit:
            break
        group.append(segment)
    return group


def _limit(store: "ColdStore") -> int:
    """Rows of a segment that a rewrite makes, at most."""
    return max(store.options.output_rows, store.rows // 64)
