"""From the files to this rank's batches: ``open_source``, ``Source``, ``Stream``."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from hpc_ctr.data import blocks as block_io
from hpc_ctr.data import order, split
from hpc_ctr.data.badrows import EARLY_ROWS, BadRowLog, BadRows
from hpc_ctr.data.batch import Batch
from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.order import OrderState, Unit
from hpc_ctr.data.prefetch import Prefetcher
from hpc_ctr.data.readers import Chunk, Reader
from hpc_ctr.data.readers.criteo import CriteoReader
from hpc_ctr.data.readers.recbole import RecboleReader
from hpc_ctr.data.rows import Rows
from hpc_ctr.data.schema import Field, check_choice
from hpc_ctr.errors import HpcCtrError, UsageError

PREFETCH = 4                                     # batches made ahead
_thresholds: dict[str, tuple[float, int]] = {}   # by layout and files: both parts of a job need it


class Source:
    """The rows of one part (train or test) of the data, as one rank sees them; made by ``open_source``.

    fields: list[Field] [F], num_dense: D, num_blocks: of the global sequence.
    """

    def __init__(self, options: DataOptions, seed: int, part: str, rank: int, ranks: int):
        """Lists the files and checks the schema against them; no communication. Raises UsageError."""
        self.options, self.part, self._seed = options, part, seed
        self.rank, self.ranks = rank, ranks
        self._by = options.split.by
        test = part == "test"
        # evaluation keeps the order of the rows, and no rank reads another's
        self._shuffle = options.shuffle and not test
        self._stripes = options.deal == "batch" and not test
        patterns, setting = (options.test_files, "data.test_files") if test and self._by == "files" \
            else (options.files, "data.files")
        paths = block_io.find_files(patterns, setting, options.base_dir)
        self._reader = self._make_reader(paths[0])
        files = [self._reader.open(path, setting) for path in paths]
        if not any(f.size > f.begin for f in files):
            raise UsageError(f"{setting}: the files hold no rows")
        self._block_bytes = block_io.block_size(options.block_bytes, sum(f.size for f in files))
        self._blocks = [] if test and self._by == "none" else block_io.cut(files, self._block_bytes)
        self.fields: list[Field] = self._reader.fields
        self.num_dense: int = self._reader.num_dense
        self.num_blocks = len(self._blocks)
        side_bad = getattr(self._reader, "side_bad", BadRows())
        side_bad.check(options.max_bad_share)
        self._first_bad = BadRows(side_bad.count, side_bad.count, side_bad.examples) if rank == 0 else BadRows()
        self._log = self._new_log()
        self._threshold = float("inf")
        self.layout = self._digest(files)
        self._memo = json.dumps([options.format, options.schema.to_dict(), options.split.test, [
            [os.path.abspath(f.path), f.size, os.stat(f.path).st_mtime_ns] for f in files]])
        self._started = [self.start(0)]  # states of the last streams: the next epoch's begins while a pass is trained

    def _make_reader(self, path: str) -> Reader:
        options = self.options
        if options.format == "criteo":
            return CriteoReader(options.schema)
        sides = [block_io.find_file(p, f"data.{which}_file", options.base_dir) if p else ""
                 for which, p in (("user", options.user_file), ("item", options.item_file))]
        return RecboleReader(options.schema, path, *sides, time=self._by == "time")

    def _digest(self, files: Sequence[block_io.DataFile]) -> str:
        """Of everything that says which row stands where in the order."""
        o = self.options
        what = [[[f.size, f.begin, f.packed] for f in files], self._block_bytes, self._seed, self._shuffle,
                o.shuffle_blocks, o.format, o.schema.to_dict(), [o.split.by, o.split.test],
                "batch" if self._stripes else "block"]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    # -- the order -----------------------------------------------------------------------------------------------

    def start(self, epoch: int) -> OrderState:
        """The state of an epoch of which nothing is read."""
        return OrderState(epoch, self.layout)

    def stream(self, state: OrderState | None = None) -> "Stream":
        """This rank's batches of what is left of an epoch (None: all of epoch 0). Raises UsageError when the state
        belongs to other data."""
        state = state or self.start(0)
        order.check_layout(state, self.layout)
        self._started = [self._started[-1], state]
        self._log = self._new_log()
        return Stream(self, state, self._log)

    def merge_positions(self, positions: Sequence[dict]) -> OrderState:
        """What remains of the epoch, from the ``position()`` of every rank's stream, in rank order.

        The streams were started from one state, that of this rank's latest stream or of the one before it.
        """
        begun = {_state_digest(state): state for state in self._started}
        starts = {p["start"] for p in positions}
        if len(positions) != self.ranks or len(starts) != 1 or not starts <= set(begun):
            raise ValueError("the positions are not those of the streams that this source started last")
        state = begun[starts.pop()]
        if self._stripes:
            if any(p != positions[0] for p in positions):
                raise ValueError("with data.deal: batch all ranks must stand at the same batch")
            positions = positions[:1]
        dealt = self._deal(state)
        left = [tuple(order.remaining(self._windows(units), p["window"], p["skip"]))
                for units, p in zip(dealt, positions, strict=True)]
        return OrderState(state.epoch, self.layout, tuple(left))

    def _deal(self, state: OrderState) -> list[list[Unit]]:
        """Units of every reading rank: with stripes there is one, and every rank is it."""
        sequence = order.sequence(self.num_blocks, self._shuffle, self._seed, state.epoch)
        return order.deal(state, sequence, 1 if self._stripes else self.ranks)

    def _windows(self, units: Sequence[Unit]) -> list[Unit]:
        # a large .gz stays alone: resuming inside it means unpacking it from its start
        def alone(block: int) -> bool:
            file = self._blocks[block].file
            return file.packed and file.size > self._block_bytes

        return order.windows(units, self.options.shuffle_blocks if self._shuffle else 1, alone)

    # -- bad rows ------------------------------------------------------------------------------------------------

    def _new_log(self) -> BadRowLog:
        o = self.options
        return BadRowLog(o.max_bad_reported, o.max_bad_share, self._first_bad)

    @property
    def bad_rows(self) -> BadRows:
        """Of this rank's latest stream so far (an epoch, or what was left of it)."""
        return self._log.snapshot()

    def merge_bad_rows(self, parts: Sequence[BadRows]) -> BadRows:
        """Of all ranks, from every rank's ``bad_rows`` in rank order (with stripes every rank has read all rows)."""
        return BadRows.merge(parts[:1] if self._stripes else parts, self.options.max_bad_reported)

    def check_bad_rows(self, merged: BadRows) -> None:
        """Raises DataError when the share of bad rows over all ranks is above ``data.max_bad_share``.

        To be called with the merged counts at the end of every epoch: a stream alone checks its own rank's rows while
        it reads, and at its end only where those are all rows.
        """
        # what was left of an epoch may be few rows, and the bad ones among them are no sample of the whole
        merged.check(self.options.max_bad_share, EARLY_ROWS if self._started[-1].ranks is not None else 0)

    # -- reading, in the stream's thread -------------------------------------------------------------------------

    def _chunks(self, block: int, time: bool = False) -> Iterator[tuple[block_io.Text, Chunk]]:
        by_hash = self._by == "hash" and not time
        for text in block_io.read(self._blocks[block], self._block_bytes):
            yield text, self._reader.parse(text.buf, self.options.max_bad_reported, self._by == "time", by_hash)

    def _mask(self, chunk: Chunk) -> np.ndarray | None:
        """bool [n]: the rows of this part; None = all."""
        if self._by == "time":
            return chunk.time > self._threshold if self.part == "test" else chunk.time <= self._threshold
        if self._by == "hash":
            test = split.hash_test_mask(chunk.row_hash, self.options.split.test, self._seed)
            return test if self.part == "test" else ~test
        return None

    def _parts(self, window: Unit, log: BadRowLog) -> Iterator[tuple[Rows, bool]]:
        """The window's rows in pieces that are shuffled together, and whether it is the last piece.

        A piece is ``shuffle_blocks`` texts (one without shuffling): all of a window of plain files.
        """
        most = self.options.shuffle_blocks if self._shuffle else 1
        texts: list[Rows] = []
        for block in window.blocks:
            for text, chunk in self._chunks(block):
                log.add(self._blocks[block].file.path, text.first_line, chunk.lines, chunk.bad_count, chunk.bad,
                        chunk.unmatched)
                mask = self._mask(chunk)
                texts.append(chunk.rows if mask is None or mask.all() else chunk.rows.take(mask))
                last = text.last and block == window.blocks[-1]
                if last or len(texts) == most:
                    rows = Rows.concat(texts)
                    texts = []
                    yield rows, last

    def _batches(self, state: OrderState, log: BadRowLog, stop: threading.Event) -> Iterator[tuple[Batch, int, int]]:
        """(batch, whole windows done, rows of the next window done) up to the end of the epoch."""
        stripes = self._stripes
        size = self.options.batch_size * (self.ranks if stripes else 1)
        own = slice(self.rank * self.options.batch_size, (self.rank + 1) * self.options.batch_size) \
            if stripes else slice(None)
        units = self._deal(state)[0 if stripes else self.rank]
        wins = self._windows(units)
        kept: list[Rows] = []                    # of a batch that goes on in the next piece
        have = 0
        for w, window in enumerate(wins):
            seen = 0                             # rows of the window before this piece
            for part, (rows, last) in enumerate(self._parts(window, log)):
                if stop.is_set():
                    return
                at = min(max(window.skip - seen, 0), rows.size)
                shuffled = order.row_order(rows.size, self._seed, state.epoch, window.blocks[0], part) \
                    if self._shuffle and at < rows.size else np.arange(rows.size)
                while at < rows.size:
                    index = shuffled[at:at + size - have]
                    at += len(index)
                    if have + len(index) < size:
                        kept.append(rows.take(index))
                        have += len(index)
                        break
                    done = (w + 1, 0) if last and at == rows.size else (w, seen + at)
                    yield (_joined(kept, rows, index, own), *done)
                    kept, have = [], 0
                seen += rows.size
                del rows, shuffled               # so that the next piece does not need room beside this one
        if have:
            whole = Rows.concat(kept)
            yield whole.batch(np.arange(whole.size)[own]), len(wins), 0
        if stripes or self.ranks == 1:
            self.check_bad_rows(log.snapshot())

    def _times(self) -> Iterator[np.ndarray]:
        for block in range(self.rank, self.num_blocks, self.ranks):
            for _, chunk in self._chunks(block, time=True):
                yield chunk.time


def _joined(kept: list[Rows], rows: Rows, index: np.ndarray, own: slice) -> Batch:
    """The batch of the rows kept from before and ``rows[index]``; of it the stripe ``own``."""
    if not kept:
        return rows.batch(index[own])
    whole = Rows.concat([*kept, rows.take(index)])
    return whole.batch(np.arange(whole.size)[own])


def _state_digest(state: OrderState) -> str:
    return hashlib.sha256(json.dumps(state.to_json()).encode()).hexdigest()[:16]


class Stream:
    """Iterator over one rank's batches of (what is left of) one epoch, read ahead by one thread; a context manager.

    All batches but the last of the epoch hold ``batch_size`` samples; nothing is dropped. With stripes (deal: batch)
    the last may hold none. Raises DataError for damaged files and for too many bad rows.
    """

    def __init__(self, source: Source, state: OrderState, log: BadRowLog):
        self._position = {"epoch": state.epoch, "window": 0, "skip": 0, "start": _state_digest(state)}
        self._ahead = Prefetcher(lambda stop: source._batches(state, log, stop), PREFETCH, "hpc_ctr-reader")

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        batch, window, skip = next(self._ahead)
        self._position = {**self._position, "window": window, "skip": skip}
        return batch

    def position(self) -> dict:
        """This rank's cursor after the batches handed out so far: numbers and texts, for ``merge_positions``."""
        return dict(self._position)

    def close(self) -> None:
        """Ends the reading thread; may be called again."""
        self._ahead.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def field_names(options: DataOptions) -> list[str]:
    """Names of the categorical fields [F] that a source with these options has. Raises UsageError."""
    options.validate()
    return [column.column for column in options.schema.categorical]


def open_source(options: DataOptions, seed: int, comm=None, part: str = "train") -> Source:
    """Opens the data of one part, "train" or "test". Collective over ``comm`` (an mpi4py communicator, or None).

    Lists the files, checks the schema against them, and finds the time that divides train from test. Errors are raised
    on all ranks: UsageError for settings, files and schema; DataError for data that cannot be read.
    """
    rank, ranks = (comm.rank, comm.size) if comm is not None else (0, 1)
    source, error = None, None
    try:
        check_choice(part, ("train", "test"), "part")
        options.validate()
        source = Source(options, seed, part, rank, ranks)
    except HpcCtrError as caught:
        error = caught
    split.raise_together(error, comm)
    if comm is not None:
        layouts = comm.allgather(source.layout)
        for other, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise UsageError(f"data.files: rank {other} finds other files, or files of other sizes, than rank 0; "
                                 "all ranks must see the same data")
    if source._by == "time" and source.num_blocks:
        known = source._memo in _thresholds
        if not (all(comm.allgather(known)) if comm is not None else known):
            _thresholds[source._memo] = split.time_threshold(source._times, options.split.test, comm)
        source._threshold = _thresholds[source._memo][0]
    return source
