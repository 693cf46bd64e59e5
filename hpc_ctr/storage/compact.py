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
