"""RecBole atomic files: tab separated, a header of ``name:type`` cells; user and item tables joined by their id.

The side tables are held in memory, as keys, by every rank. Text values are hashed as the bytes that stand in the cell.
"""

import os
from dataclasses import dataclass

import numpy as np

from hpc_ctr.data.badrows import BadRows
from hpc_ctr.data.blocks import MAX_TEXT, Block, DataFile, read, top_lines
from hpc_ctr.data.keys import field_salt, missing_key
from hpc_ctr.data.readers import Cells, Chunk, mark_labels
from hpc_ctr.data.rows import bag_rows, spans
from hpc_ctr.data.schema import CategoricalColumn, DenseColumn, Field, Schema, did_you_mean
from hpc_ctr.errors import UsageError
from hpc_ctr.kernels import parse

_NONE = np.uint64(0)
TYPES = ("token", "token_seq", "float", "float_seq")


def read_header(path: str, setting: str) -> tuple[dict[str, str], int]:
    """({column: type} in the order of the file, bytes of the header line). Raises UsageError."""
    name = os.path.basename(path)
    line = b"".join(top_lines(path, 1))
    if not line:
        raise UsageError(f"{setting}: {name} is empty; a RecBole file begins with a header of name:type cells")
    columns: dict[str, str] = {}
    for cell in line.rstrip(b"\r\n").decode("utf-8-sig", "replace").split("\t"):
        column, colon, kind = cell.rpartition(":")
        if not colon or kind not in TYPES:
            raise UsageError(f"{setting}: {name}, line 1: {cell!r} is not name:type with one of the types "
                             f"{', '.join(TYPES)}{did_you_mean(kind, TYPES) if colon else ''}")
        if column in columns:
            raise UsageError(f"{setting}: {name}, line 1: column {column!r} stands there twice")
        columns[column] = kind
    return columns, len(line)


@dataclass(frozen=True)
class _Column:
    """One column as the model sees it, where it lies in its file, and how it is read."""

    index: int
    name: str
    log1p: bool = False                    # dense
    salt: np.uint64 = _NONE                # categorical, with what follows
    separator: np.ndarray | None = None    # uint8 [w]: multi-valued
    missing: np.uint64 = _NONE
    skip: bool = False

    def numbers(self, cells: Cells) -> np.ndarray:
        """float32 [lines]."""
        out = np.zeros(cells.lines)
        parse.number_column(cells.buf, cells.cells, self.index, parse.BAD_NUMBER, parse.OK, self.log1p, out,
                            cells.code, cells.column)
        return out.astype(np.float32)

    @property
    def multi(self) -> bool:
        """Whether a bag may hold other than one key."""
        return self.separator is not None or self.skip

    def bags(self, cells: Cells) -> tuple[np.ndarray, np.ndarray | None]:
        """(keys, counts int64 [lines] or None) of good lines; bad lines have no keys, or any one."""
        lines = cells.cells
        if self.separator is None:
            keys = np.empty(cells.lines, np.uint64)
            parse.text_column(cells.buf, lines, self.index, self.salt, keys)
            if not self.skip:
                return keys, None
            there = (keys != self.missing) & (cells.code == parse.OK)
            return keys[there], there.astype(np.int64)
        counts = np.zeros(cells.lines, np.int64)
        none = np.zeros(0, np.uint64)
        parse.text_bags(cells.buf, lines, self.index, self.separator, self.salt, counts, none)
        keys = np.empty(counts.sum(), np.uint64)
        if len(keys):
            parse.text_bags(cells.buf, lines, self.index, self.separator, self.salt, counts, keys)
        if not self.skip:
            empty = counts == 0
            starts = np.cumsum(counts) - counts
            keys = np.insert(keys, starts[empty], self.missing)
            counts[empty] = 1
        return keys, counts


class _Side:
    """A user or item table in memory: the rows by their id, and after the last one a row of missing features."""

    def __init__(self, path: str, setting: str, which: str):
        self.path, self.which = path, which
        self.columns, begin = read_header(path, setting)
        self.setting = setting
        self.key = next(iter(self.columns))
        self.file = DataFile(path, os.path.getsize(path), begin, 2)
        self.dense: dict[str, np.ndarray] = {}
        self.bags: dict[str, tuple[np.ndarray, np.ndarray]] = {}          # keys, offsets

    def load(self, dense: list[_Column], categorical: list[_Column], bad: BadRows) -> None:
        """Reads the columns that the schema names. Raises UsageError when an id stands there twice."""
        block = Block(self.file, self.file.begin, self.file.size)
        text = np.concatenate([t.buf for t in read(block, 1 << 24)])
        if len(text) > MAX_TEXT:
            raise UsageError(f"{self.setting}: {self.path} holds more than {MAX_TEXT >> 30} GiB; a side table is kept "
                             "in memory and must be smaller")
        cells = Cells(text, list(self.columns))
        numbers = [column.numbers(cells) for column in dense]
        good = cells.good()
        index = np.arange(cells.lines) if good is None else good
        for column, values in zip(dense, numbers, strict=True):
            self.dense[column.name] = np.append(values[index], np.float32(0))
        for column in categorical:
            keys, counts = column.bags(cells)
            counts = np.ones(cells.lines, np.int64) if counts is None else counts
            starts = (np.cumsum(counts) - counts)[index]
            counts = counts[index]
            keys = keys[spans(starts, counts)]
            if not column.skip:
                keys, counts = np.append(keys, column.missing), np.append(counts, 1)
            offsets = np.zeros(len(index) + 2, np.int64)
            np.cumsum(counts, out=offsets[1:len(counts) + 1])
            offsets[len(counts) + 1:] = offsets[len(counts)]
            self.bags[column.name] = keys, offsets
        ids = np.empty(cells.lines, np.uint64)
        parse.text_column(text, cells.cells, 0, _NONE, ids)
        ids = ids[index]
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        twice = np.flatnonzero(self._ids[1:] == self._ids[:-1])
        if len(twice):
            line = int(index[self._order[twice[0] + 1]])
            raise UsageError(f"{self.setting}: {self.path}, line {line + 2}: this {self.key} stands there twice")
        bad.count += cells.lines - len(index)
        bad.total += cells.lines
        bad.examples += [(self.path, line + 2, reason) for line, reason in cells.bad(20)]

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """(row of each id hash, int64 [n], number of ids that are not there)."""
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), len(ids)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        found = self._ids[at] == ids
        return np.where(found, self._order[at], len(self._ids)), int(len(ids) - found.sum())


class RecboleReader:
    """Interactions with the columns of a user and an item table beside them."""

    def __init__(self, schema: Schema, path: str, user_file: str = "", item_file: str = "", time: bool = False):
        """path: an interaction file, for its header. time: whether the time column is needed. Raises UsageError."""
        self._columns, _ = read_header(path, "data.files")
        self._file = os.path.basename(path)
        self._sides = [_Side(p, f"data.{which}_file", which)
                       for p, which in ((user_file, "user"), (item_file, "item")) if p]
        self._names = list(self._columns)
        for side in self._sides:
            if side.key not in self._columns:
                raise UsageError(f"{side.setting}: its first column {side.key!r} is not in {self._file} (columns: "
                                 f"{', '.join(self._names)}), so the two cannot be joined"
                                 f"{did_you_mean(side.key, self._names)}")
        self._label = schema.label_rule
        self._label_index = self._own(self._label.column, "data.schema.label")
        self._time_index = self._own(schema.time, "data.schema.time") if time else -1
        dense = [self._dense(c, f"data.schema.dense[{i}]") for i, c in enumerate(schema.dense)]
        fields = [self._field(c, f"data.schema.categorical[{i}]") for i, c in enumerate(schema.categorical)]
        self._dense_columns, self._categorical = dense, fields
        self.side_bad = BadRows()
        for side in self._sides:
            side.load([c for s, c in dense if s is side], [c for s, c in fields if s is side], self.side_bad)
        self.fields = [Field(c.name, c.multi) for _, c in fields]
        self.num_dense = len(dense)

    def _own(self, column: str, setting: str) -> int:
        """Index of a column of the interactions."""
        if column not in self._columns:
            raise UsageError(f"{setting}: column {column!r} is not in {self._file} (columns: "
                             f"{', '.join(self._names)}){did_you_mean(column, self._names)}")
        if self._columns[column].endswith("_seq"):
            raise UsageError(f"{setting}: column {column!r} of {self._file} is a {self._columns[column]}; one number "
                             "a row is needed")
        return self._names.index(column)

    def _find(self, column: str, setting: str) -> tuple[_Side | None, int, str]:
        """(side table or None for the interactions, index there, type) of a column."""
        places = [(s, s.columns) for s in self._sides if column in s.columns and column != s.key]
        if column in self._columns:
            places.insert(0, (None, self._columns))
        if not places:
            known = self._names + [c for s in self._sides for c in s.columns if c != s.key]
            raise UsageError(f"{setting}: column {column!r} is in none of the files (columns: {', '.join(known)})"
                             f"{did_you_mean(column, known)}")
        if len(places) > 1:
            raise UsageError(f"{setting}: column {column!r} is in several of the joined files; rename it in one")
        side, columns = places[0]
        return side, list(columns).index(column), columns[column]

    def _dense(self, column: DenseColumn, setting: str) -> tuple[_Side | None, _Column]:
        side, index, kind = self._find(column.column, setting)
        if kind.endswith("_seq"):
            raise UsageError(f"{setting}: column {column.column!r} is a {kind}, and a dense column holds one number")
        return side, _Column(index, column.column, log1p=column.transform == "log1p")

    def _field(self, column: CategoricalColumn, setting: str) -> tuple[_Side | None, _Column]:
        side, index, kind = self._find(column.column, setting)
        separator = column.separator
        if separator is None and kind.endswith("_seq"):
            separator = " "
        pattern = np.frombuffer(separator.encode("utf-8"), np.uint8) if separator else None
        name = column.column
        return side, _Column(index, name, salt=np.uint64(field_salt(name)), separator=pattern,
                             missing=np.uint64(missing_key(name)), skip=column.missing == "skip")

    def open(self, path: str, setting: str) -> DataFile:
        """All interaction files must have the same header."""
        columns, begin = read_header(path, setting)
        if columns != self._columns:
            raise UsageError(f"{setting}: {path} has another header than {self._file}: {', '.join(columns)} instead "
                             f"of {', '.join(self._names)}")
        return DataFile(path, os.path.getsize(path), begin, 2)

    def parse(self, buf: np.ndarray, most: int, time: bool = False, row_hash: bool = False) -> Chunk:
        """See ``Reader``. A row without its user or item is good, with that side's features missing."""
        cells = Cells(buf, self._names)
        label = self._values(cells, self._label_index, parse.BAD_LABEL, parse.EMPTY_LABEL)
        if not self._label.operator:
            mark_labels(label, cells, self._label_index)
        when = self._values(cells, self._time_index, parse.BAD_TIME, parse.BAD_TIME) if time else None
        own_dense = [c.numbers(cells) if side is None else None for side, c in self._dense_columns]
        good = cells.good()
        index = np.arange(cells.lines) if good is None else good
        rows_of, unmatched = {}, {}
        for side in self._sides:
            ids = np.empty(cells.lines, np.uint64)
            parse.text_column(buf, cells.cells, self._names.index(side.key), _NONE, ids)
            rows_of[side.which], lost = side.find(ids[index])
            if lost:
                unmatched[side.which] = lost
        dense = np.empty((len(index), self.num_dense), np.float32)
        for d, (side, column) in enumerate(self._dense_columns):
            dense[:, d] = own_dense[d][index] if side is None else side.dense[column.name][rows_of[side.which]]
        bags = [self._own_bags(column, cells, good) if side is None
                else _side_bags(side, column, rows_of[side.which]) for side, column in self._categorical]
        rows = bag_rows(self._label.apply(label[index]), dense, bags)
        return Chunk(rows, cells.lines, cells.lines - len(index), cells.bad(most),
                     None if when is None else when[index], cells.row_hash()[index] if row_hash else None, unmatched)

    @staticmethod
    def _values(cells: Cells, column: int, fault: int, empty: int) -> np.ndarray:
        out = np.zeros(cells.lines)
        parse.number_column(cells.buf, cells.cells, column, fault, empty, False, out, cells.code, cells.column)
        return out

    @staticmethod
    def _own_bags(column: _Column, cells: Cells, good: np.ndarray | None):
        keys, counts = column.bags(cells)
        if good is None:
            return keys, counts
        if counts is None:
            return keys[good], None
        starts = np.cumsum(counts) - counts
        return keys[spans(starts[good], counts[good])], counts[good]


def _side_bags(side: _Side, column: _Column, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    keys, offsets = side.bags[column.name]
    if not column.multi:
        return keys[rows], None
    counts = np.diff(offsets)[rows]
    return keys[spans(offsets[rows], counts)], counts
