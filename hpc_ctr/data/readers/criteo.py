"""Criteo TSV: label, numbers and hex ids, tab separated, no header; plain or .gz."""

import os

import numpy as np

from hpc_ctr.data.blocks import DataFile, top_lines
from hpc_ctr.data.keys import field_salts, missing_key
from hpc_ctr.data.readers import Cells, Chunk, mark_labels
from hpc_ctr.data.rows import Rows
from hpc_ctr.data.schema import Field, Schema
from hpc_ctr.errors import UsageError
from hpc_ctr.kernels.parse import criteo_columns

_LOOK = 10


class CriteoReader:
    """The schema's dense and categorical columns, in that order, are the file's columns after the label."""

    def __init__(self, schema: Schema):
        self._schema = schema
        self._label = schema.label_rule
        names = [c.column for c in schema.categorical]
        self._names = ["label"] + [c.column for c in schema.dense] + names
        self._salts = field_salts(names)
        self._log1p = np.array([c.transform == "log1p" for c in schema.dense], bool)
        self._skip = [f for f, c in enumerate(schema.categorical) if c.missing == "skip"]
        self.fields = [Field(c.column, c.missing == "skip") for c in schema.categorical]
        self.num_dense = len(schema.dense)

    def open(self, path: str, setting: str) -> DataFile:
        """A wrong schema shows in the number of columns; one damaged line at the top must not stop the run."""
        counts = [line.count(b"\t") + 1 for line in top_lines(path, _LOOK)]
        if counts and len(self._names) not in counts:
            raise UsageError(f"{setting}: {os.path.basename(path)} has {counts[0]} columns, and the schema describes "
                             f"{len(self._names)} (label, {self.num_dense} dense, {len(self.fields)} categorical); "
                             "set data.schema to what is in the file")
        return DataFile(path, os.path.getsize(path))

    def parse(self, buf: np.ndarray, most: int, time: bool = False, row_hash: bool = False) -> Chunk:
        """See ``Reader``."""
        cells = Cells(buf, self._names)
        n = cells.lines
        label = np.zeros(n)
        dense = np.zeros((n, self.num_dense), np.float32)
        keys = np.zeros((n, len(self.fields)), np.uint64)
        criteo_columns(buf, cells.cells, self._log1p, self._salts, label, dense, keys, cells.code, cells.column)
        if not self._label.operator:
            mark_labels(label, cells, 0)
        good = cells.good()
        if good is not None:
            label, dense, keys = label[good], dense[good], keys[good]
        rows = self._rows(self._label.apply(label), dense, keys)
        hashes = cells.row_hash() if row_hash else None
        if hashes is not None and good is not None:
            hashes = hashes[good]
        return Chunk(rows, n, n - len(label), cells.bad(most), row_hash=hashes)

    def _rows(self, label: np.ndarray, dense: np.ndarray, keys: np.ndarray) -> Rows:
        if not self._skip:
            return Rows(label, dense, keys, None, len(self.fields))
        keep = np.ones(keys.shape, bool)
        for f in self._skip:
            keep[:, f] = keys[:, f] != np.uint64(missing_key(self.fields[f].name))
        offsets = np.zeros(keys.size + 1, np.int64)
        np.cumsum(keep.ravel(), out=offsets[1:])
        return Rows(label, dense, keys[keep], offsets, len(self.fields))
