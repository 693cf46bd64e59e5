"""Rewriting segments of the cold tier, so that superseded rows give their disk space back."""

from typing import TYPE_CHECKING

import numpy as np

from hpc_ctr.storage import fs
from hpc_ctr.storage.rewrite import Output, Rewrite, append, live_rows, open_cursors
from hpc_ctr.storage.segment import SegmentWriter, merge

if TYPE_CHECKING:
    from hpc_ctr.storage.cold import ColdStore, Segment

_EARLY = 7 / 8  # of what makes a rewrite overdue: from here on it may be done in the background


def compact(store: "ColdStore", victims: list["Segment"], limit: int) -> None:
    """Write the live rows of ``victims`` into new segments of up to ``limit`` rows, and drop the victims.

    The victims are all segments of rows, or all of deletions, and none is being rewritten in the background.
    Each new segment is committed as soon as it is complete: a crash or an error in between loses nothing, and
    rows that were moved are served from their new place.
    """
    left = sum(segment.live for segment in victims)
    # rows that were overwritten unread may turn out to be live: then everything has to be read to the end
    doubtful = any(segment.number in store.claims for segment in victims)
    if not left and not doubtful:
        store.drop_dead()
        return
    cursors = open_cursors(store, victims)
    writer: SegmentWriter | None = None
    number, moved = 0, []
    try:
        for parts in merge(cursors):
            if doubtful and any([store.compare_claims(victims[part.cursor], part.first_row, part.keys)
                                 for part in parts]):
                left = sum(segment.live for segment in victims) - sum(len(keys) for keys, _ in moved)
            keys, old, sources = live_rows(store, victims, parts)
            begin = 0
            while begin < len(keys):
                if writer is None:
                    number, writer = store.write_segment(min(limit, left), victims[0].deletions)
                count = append(writer, sources[begin:])
                moved.append((keys[begin:begin + count], old[begin:begin + count]))
                begin += count
                left -= count
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


def begin_rewrite(store: "ColdStore", victims: list["Segment"], limit: int) -> None:
    """As ``compact``, in the background: ``finish_rewrite`` takes over what it makes."""
    store.rewriting = Rewrite(store, victims, limit)


def finish_rewrite(store: "ColdStore") -> None:
    """Wait for the rewrite in the background, if there is one, and commit what it made. Raises what went wrong in it.

    Nothing may be reading the victims.
    """
    if store.rewriting is None:
        return
    rewrite, pending = store.rewriting, []
    try:
        pending = rewrite.outputs()
        store.check_writable()
        _compare_late_claims(store, rewrite)
        while pending:
            _take_over(store, pending.pop(0))
    finally:
        store.rewriting = None
        for output in pending:
            fs.remove_quietly(store.path_of(output.number))
    store.drop_dead()


def _compare_late_claims(store: "ColdStore", rewrite: Rewrite) -> None:
    """Compare the keys of rows that were copied, and claimed since; those before were compared while copying. A key that
    lost its entry to another one has it back then, and no claims on the victims are left."""
    contested = list(rewrite.contested)
    for victim in rewrite.victims:
        if victim.number not in store.claims:
            continue
        rows, claimants = store.claims.among(victim.number, 0, victim.file.rows)
        for output in rewrite.outputs():
            order = output.by_place
            place = np.searchsorted(output.old, victim.base + rows, sorter=order)
            place = order[np.minimum(place, len(order) - 1)]
            keys = output.keys[place]
            contested.append(keys[(output.old[place] == victim.base + rows) & (keys != claimants)])
    if len(keys := np.unique(np.concatenate(contested))):
        store.locate(keys)  # which looks among the claims, and recovers
    for victim in rewrite.victims:
        store.claims.drop(victim.number)


def _take_over(store: "ColdStore", output: Output) -> None:
    """Commit a segment that was written in the background; rows that were overwritten meanwhile are stale in it."""
    nothing = np.zeros(len(store.segments()), np.int64)
    added = store.commit(output.number, output.digest, nothing, base=output.base)
    new = added.base + np.arange(len(output.keys))
    moved = store.index.move_present(output.keys, output.old, new)
    keys, old, new = output.keys[moved], output.old[moved], new[moved]
    store.supersede(old)
    added.live = len(keys)
    store.counters.rows_compacted += len(output.keys)
    if store.on_move is not None:
        store.on_move(keys, old, new)


def tidy(store: "ColdStore") -> None:
    """See ColdStore.tidy."""
    if store.rewriting is not None and store.rewriting.done:
        finish_rewrite(store)
    limit = _limit(store)
    for deletions in (False, True):
        while _rewrite(store, limit, deletions):
            pass
    if store.deleted:
        purge(store, limit)


def compact_all(store: "ColdStore") -> None:
    """See ColdStore.compact."""
    finish_rewrite(store)
    limit = _limit(store)
    for deletions in (False, True):
        if stale := [s for s in store.segments_of(deletions) if s.live < s.file.rows]:
            compact(store, stale, limit)


def _rewrite(store: "ColdStore", limit: int, deletions: bool) -> bool:
    """Rewrite one group of segments of rows, or of deletions, or begin to; False when there is nothing to do now."""
    options = store.options
    if dead := [s for s in store.segments_of(deletions) if not s.live and s not in store.in_flight]:
        compact(store, dead, limit)
        return True
    group = _overdue(store, limit, deletions, options.stale_share, options.max_segments)
    if group and not deletions and store.rewriting is not None:
        finish_rewrite(store)
    elif group and not deletions and _worth_a_thread(store, group):
        begin_rewrite(store, group, limit)  # and wait for it: it is overdue
    elif group:
        compact(store, group, limit)
    elif not deletions and store.rewriting is None:
        # early, so that there is time before it has to be done
        early = _overdue(store, limit, deletions, options.stale_share * _EARLY, int(options.max_segments * _EARLY))
        if early and _worth_a_thread(store, early):
            begin_rewrite(store, early, limit)
    return bool(group)


def _overdue(store: "ColdStore", limit: int, deletions: bool, share: float, most: int) -> list["Segment"]:
    """The segments to rewrite next when more than ``share`` of all rows is stale or there are more than ``most``
    segments; none otherwise."""
    segments = store.segments_of(deletions)
    rows, live = sum(s.file.rows for s in segments), sum(s.live for s in segments)
    chosen = []
    if rows - live > share * rows:
        # the most stale first: they give back the most for what is copied, and those that are left go on to decay
        chosen = sorted((s for s in segments if s.live < s.file.rows * (1 - share / 2)),
                        key=lambda s: (s.live / s.file.rows, s.number))
    elif len(segments) > most:
        by_size = sorted(segments, key=lambda s: (s.live, s.number))
        chosen = [s for s in by_size[:len(by_size) * 3 // 4] if s.live <= limit // 2]
    group = _first_of(chosen, limit)
    if len(group) == 1 and group[0].live == group[0].file.rows:
        return []
    return group


def _worth_a_thread(store: "ColdStore", group: list["Segment"]) -> bool:
    return sum(s.live for s in group) * store.layout.stored_bytes >= store.options.background_bytes


def purge(store: "ColdStore", limit: int) -> None:
    """Drop deletions that no older segment needs; when they are many, rewrite the older segments first."""
    while True:
        rows = [s.number for s in store.segments_of(False)]
        spent = [s for s in store.segments_of(True) if s.number < min(rows, default=s.number + 1)]
        if spent:
            store.drop_deletions(spent)
        if store.deleted <= max(store.rows // 4, store.options.output_rows // 16):
            return
        if store.rewriting is not None:  # it holds older segments
            finish_rewrite(store)
            continue
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
