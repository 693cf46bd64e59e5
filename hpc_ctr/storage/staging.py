"""Rows of the next pass, read from the cold tier while the present pass trains.

Looking ahead changes nothing: what was read counts only if, when the next pass begins, the index still says that the row
lies where it was read. Segments never change, so the bits are the same then.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from hpc_ctr.storage.reader import Wanted, read_rows

if TYPE_CHECKING:
    from hpc_ctr.storage.cold import ColdStore


class Staging:
    """The cold rows of some keys, on their way into memory. One thread makes and uses it, another one reads.

    keys: uint64 [n], ascending and distinct; the rows of at most ``limit`` of them are read. ``wait`` must have been
    called before a segment of the store may go.
    """

    def __init__(self, cold: "ColdStore", keys: np.ndarray, limit: int, thread: ThreadPoolExecutor):
        locations = cold.candidates(keys)
        there = np.flatnonzero(locations >= 0)[:limit]
        self.keys, self.locations = keys[there], locations[there]
        self.words = np.empty((len(there), cold.layout.words), np.uint32)
        self.t = np.empty(len(there), np.uint32)
        self._found = np.zeros(len(there), np.bool_)
        self._cold = cold
        order = np.argsort(self.locations, kind="stable")
        wanted = Wanted(self.locations[order], order, self.keys, np.arange(len(there)), self.words, self.t, self._found)
        options = cold.options
        self._reading = thread.submit(read_rows, cold.segment_map, wanted, cold.layout.stored_bytes, options.gap_bytes,
                                      options.read_bytes, options.threads)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(a.nbytes for a in (self.keys, self.locations, self.words, self.t, self._found))

    def wait(self) -> None:
        """Until everything is read. Raises StorageError naming file and row when a row is damaged or a read failed."""
        if self._reading is not None:
            reading, self._reading = self._reading, None
            bad, reads, nbytes = reading.result()
            self._cold.counters.reads += reads
            self._cold.counters.bytes_read += nbytes
            if bad >= 0:
                raise self._cold.damaged(int(np.sort(self.locations)[bad]))

    def moved(self, keys: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
        """Rows were copied to another segment."""
        if not len(self.keys):
            return
        place, here = self._places(keys)
        here &= self.locations[place] == old
        self.locations[place[here]] = new[here]

    def serve(self, keys: np.ndarray, targets: np.ndarray, words: np.ndarray, t: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
        """Copy what was read of ``keys`` to rows ``targets`` of ``words`` and ``t``, as ColdStore.fetch does it; returns
        served bool [n] and locations int64 [n]."""
        self.wait()
        if not len(self.keys):
            return np.zeros(len(keys), np.bool_), np.full(len(keys), -1, np.int64)
        place, served = self._places(keys)
        served &= self._found[place]
        served[served] = self._cold.index.has(keys[served], self.locations[place[served]])
        words[targets[served], :self.words.shape[1]] = self.words[place[served]]
        t[targets[served]] = self.t[place[served]]
        return served, np.where(served, self.locations[place], -1)

    def _places(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return place, self.keys[place] == keys
