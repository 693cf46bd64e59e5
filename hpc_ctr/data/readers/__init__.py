"""Readers: text of a file format to columns of rows. One module a format, one interface: ``Reader``."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hpc_ctr.data.blocks import DataFile
from hpc_ctr.data.rows import Rows
from hpc_ctr.data.schema import Field
from hpc_ctr.kernels import parse


@dataclass
class Chunk:
    """What some lines of text held.

    rows: the n good rows. lines: all lines. bad_count of them are bad; bad: the first, as (line from 0, reason).
    time: float64 [n], row_hash: uint64 [n] (of the line's bytes), where asked for. unmatched: see ``BadRows``.
    """

    rows: Rows
    lines: int
    bad_count: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    time: np.ndarray | None = None
    row_hash: np.ndarray | None = None
    unmatched: dict[str, int] = field(default_factory=dict)


class Reader(Protocol):
    """A file format with a schema. Knows no ranks and no order."""

    fields: list[Field]
    num_dense: int

    def open(self, path: str, setting: str) -> DataFile:
        """Looks at the start of a file: where its rows begin. Raises UsageError when it does not fit the schema."""

    def parse(self, buf: np.ndarray, most: int, time: bool = False, row_hash: bool = False) -> Chunk:
        """Reads the lines in ``buf`` (uint8); reasons are given for the first ``most`` bad ones."""


class Cells:
    """Lines of text cut into cells, with the first fault of every line."""

    def __init__(self, buf: np.ndarray, names: list[str]):
        """names: the columns, in the order of the file."""
        self.buf, self.names = buf, names
        self.lines = parse.count_byte(buf, 10) + int(len(buf) > 0 and buf[-1] != 10)
        self.code = np.zeros(self.lines, np.int8)
        self.column = np.zeros(self.lines, np.int16)
        self.cells = parse.split_cells(buf, self.lines, len(names), self.code)

    def good(self) -> np.ndarray | None:
        """Indices, int64, of the lines without a fault; None when that is all of them."""
        return np.flatnonzero(self.code == parse.OK) if self.code.any() else None

    def row_hash(self) -> np.ndarray:
        """Hash, uint64 [lines], of each line's bytes without the line end."""
        return parse.line_hashes(self.buf, self.cells)

    def bad(self, most: int) -> list[tuple[int, str]]:
        """The first ``most`` faults as (line from 0, reason)."""
        return [(int(line), self._reason(int(line))) for line in np.flatnonzero(self.code)[:most]]

    def _reason(self, line: int) -> str:
        code, column = self.code[line], int(self.column[line])
        starts = self.cells[line]
        if code == parse.BAD_COLUMNS:
            text = self.buf[starts[0]:starts[-1] - 1]
            if len(text) == 0:
                return "the line is empty"
            return f"{parse.count_byte(text, 9) + 1} columns instead of {len(self.names)}"
        cell = self.buf[starts[column]:starts[column + 1] - 1].tobytes()
        shown = repr(cell[:40].decode("utf-8", "backslashreplace")) + ("..." if len(cell) > 40 else "")
        where = f"column {column + 1} ({self.names[column]})"
        return {parse.BAD_LABEL: f"{where}: {shown} is not a label (0 or 1, or a number where it is compared)",
                parse.EMPTY_LABEL: f"{where}: the label is empty",
                parse.BAD_NUMBER: f"{where}: {shown} is not a number",
                parse.BAD_HEX: f"{where}: {shown} is not an id of 1 to 16 hex digits",
                parse.RESERVED_ID: f"{where}: the id {shown} is reserved",
                parse.BAD_TIME: f"{where}: {shown} is not a time"}[int(code)]


def mark_labels(values: np.ndarray, cells: Cells, column: int) -> None:
    """Marks good lines whose label ``values`` (float64 [lines]) is neither 0 nor 1."""
    wrong = (cells.code == parse.OK) & (values != 0) & (values != 1)
    cells.code[wrong], cells.column[wrong] = parse.BAD_LABEL, column
