"""Rows that a put has superseded on the strength of a fingerprint, before anybody has compared the keys.

The cold index holds no keys. To know that a put overwrites a row, and whose, one would have to read it: a random read for
each key. Instead the one entry that matches (40 bits do) is taken to be the key's own and moved to the new row, and the
old place is noted here with the key that claimed it. When the old segment is read from front to back, to be rewritten or
dropped, the keys are compared. Until then nothing is lost either: a key that is not found although something matched is
looked for among these places. A claim is wrong about once in 10^9 puts; that case is exact too, only slow.
"""

import numpy as np

from hpc_ctr.kernels.cold_index import same_print

_BYTES = 12     # of a claim: row uint32, key uint64


class Claims:
    """Claims by segment: which rows of it were superseded by which keys. Lost when the store closes, for opening
    compares all keys.

    limit_bytes: memory for them; ``room`` says how many more may be made.
    """

    def __init__(self, limit_bytes: int):
        self._limit = limit_bytes // _BYTES
        self._count = 0
        self._of: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    @property
    def room(self) -> int:
        """Claims that may still be made."""
        return self._limit - self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._count * _BYTES

    def limit(self, nbytes: int) -> bool:
        """Change the memory for claims; whether those that there are fit into it."""
        self._limit = nbytes // _BYTES
        return self._count <= self._limit

    def __contains__(self, segment: int) -> bool:
        return segment in self._of

    def add(self, segment: int, rows: np.ndarray, keys: np.ndarray) -> None:
        """Note that ``keys`` uint64 [n] claim ``rows`` [n] of a segment, given by its number."""
        if len(rows):
            order = np.argsort(rows)
            self._of.setdefault(segment, []).append((rows[order].astype(np.uint32), keys[order]))
            self._count += len(rows)

    def drop(self, segment: int) -> None:
        """Forget a segment's claims, when it is gone or all of them were compared."""
        self._count -= sum(len(rows) for rows, _ in self._of.pop(segment, []))

    def among(self, segment: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The claims on rows ``first`` to ``first + count - 1`` of a segment: rows int64 [m], counted from ``first``, and
        the keys that claimed them, uint64 [m]."""
        if segment not in self._of:
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        at, keys = self._sorted(segment)
        begin, end = np.searchsorted(at, np.array([first, first + count]))
        return at[begin:end].astype(np.int64) - first, keys[begin:end]

    def _sorted(self, segment: int) -> tuple[np.ndarray, np.ndarray]:
        """A segment's claims by row. A rewrite asks many times, each put has added some: they are joined once."""
        parts = self._of[segment]
        if len(parts) > 1:
            at, keys = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(at, kind="stable")
            # a new list: whoever goes through the old one meanwhile sees all of it
            parts = self._of[segment] = [(at[order], keys[order])]
        return parts[0]

    def rivals(self, key: np.uint64) -> list[tuple[int, int]]:
        """Places (segment, row) that were claimed by other keys which look like ``key`` to the index."""
        found = []
        for segment, parts in self._of.items():
            for rows, keys in parts:
                alike = same_print(keys, key)
                found += [(segment, int(row)) for row in rows[alike & (keys != key)]]
        return found
