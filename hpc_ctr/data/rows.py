"""Parsed rows as columns, row-major, so that a shuffled batch finds all of a row's keys side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_ctr.data.batch import Batch
from hpc_ctr.kernels.parse import gather_bags, gather_single


def spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Indices, int64, of the spans ``starts[i] : starts[i] + counts[i]``, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)


@dataclass(frozen=True)
class Rows:
    """n rows. label: float32 [n]. dense: float32 [n, D]. fields: F.

    Without ``offsets`` every bag holds one key and keys is uint64 [n, F]; else keys is uint64 [nnz] and bag (row, f) is
    ``keys[offsets[row*F + f] : offsets[row*F + f + 1]]`` (offsets int64 [n*F + 1]).
    """

    label: np.ndarray
    dense: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray | None
    fields: int

    @property
    def size(self) -> int:
        """Number of rows n."""
        return len(self.label)

    def take(self, index: np.ndarray) -> "Rows":
        """The rows ``index`` (int64 or bool), in that order."""
        if index.dtype == bool:
            index = np.flatnonzero(index)
        if self.offsets is None:
            return Rows(self.label[index], self.dense[index], self.keys[index], None, self.fields)
        bags = (index[:, None] * self.fields + np.arange(self.fields)).ravel()
        counts = np.diff(self.offsets)[bags]
        offsets = np.zeros(len(bags) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return Rows(self.label[index], self.dense[index], self.keys[spans(self.offsets[bags], counts)], offsets,
                    self.fields)

    def batch(self, index: np.ndarray) -> Batch:
        """The rows ``index`` (int64 [B]) as a field-major Batch."""
        if self.offsets is None:
            keys = gather_single(self.keys, index)
            offsets = np.arange(len(keys) + 1, dtype=np.int64)
        else:
            keys, offsets = gather_bags(self.keys, self.offsets, index, self.fields)
        return Batch(self.label[index], self.dense[index], keys, offsets)

    @staticmethod
    def concat(parts: "Sequence[Rows]") -> "Rows":
        """The rows of all parts (at least one, of one source), one part after the other."""
        if len(parts) == 1:
            return parts[0]
        offsets = None
        if parts[0].offsets is not None:
            starts = np.cumsum([0, *(p.offsets[-1] for p in parts[:-1])])
            shifted = [p.offsets[1:] + start for p, start in zip(parts, starts, strict=True)]
            offsets = np.concatenate([np.zeros(1, np.int64), *shifted])
        return Rows(np.concatenate([p.label for p in parts]), np.concatenate([p.dense for p in parts]),
                    np.concatenate([p.keys for p in parts]), offsets, parts[0].fields)


def bag_rows(label: np.ndarray, dense: np.ndarray, columns: "Sequence[tuple[np.ndarray, np.ndarray | None]]") -> Rows:
    """Rows from one (keys, counts) a field: counts int64 [n], or None where every bag holds one key."""
    n, fields = len(label), len(columns)
    if all(counts is None for _, counts in columns):
        keys = np.empty((n, fields), np.uint64)
        for f, (column, _) in enumerate(columns):
            keys[:, f] = column
        return Rows(label, dense, keys, None, fields)
    sizes = np.ones((n, fields), np.int64)
    for f, (_, counts) in enumerate(columns):
        if counts is not None:
            sizes[:, f] = counts
    offsets = np.zeros(n * fields + 1, np.int64)
    np.cumsum(sizes.ravel(), out=offsets[1:])
    starts = offsets[:-1].reshape(n, fields)
    keys = np.empty(offsets[-1], np.uint64)
    for f, (column, counts) in enumerate(columns):
        keys[starts[:, f] if counts is None else spans(starts[:, f], counts)] = column
    return Rows(label, dense, keys, offsets, fields)
