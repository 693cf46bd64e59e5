"""Batches that are in memory already, as a source: for tests, experiments and programs that read data themselves."""

from collections.abc import Sequence
from typing import Any

from hpc_ctr.data.badrows import BadRows
from hpc_ctr.data.batch import Batch


class BatchList:
    """A source over batches in memory: what Feed needs of data.source."""

    def __init__(self, batches: Sequence[Batch], num_dense: int, fields: list[Any]):
        self.batches = batches
        self.num_dense = num_dense
        self.fields = fields

        self.bad_rows = BadRows()

    def start(self, epoch: int) -> None:
        """There is one order and no cursor in it."""

    def stream(self, state: Any = None) -> "_ListStream":
        """All batches, in order."""
        return _ListStream(self.batches)

    def merge_bad_rows(self, parts: list[BadRows]) -> BadRows:
        """Batches in memory have none."""
        return parts[0]

    def check_bad_rows(self, merged: BadRows) -> None:
        """See merge_bad_rows."""


class _ListStream:
    def __init__(self, batches: Sequence[Batch]):
        self._batches = batches
        self._at = 0

    def __iter__(self) -> "_ListStream":
        return self

    def __next__(self) -> Batch:
        if self._at == len(self._batches):
            raise StopIteration
        self._at += 1
        return self._batches[self._at - 1]

    def position(self) -> int:
        return self._at

    def close(self) -> None:
        pass
