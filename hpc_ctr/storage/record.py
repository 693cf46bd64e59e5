"""The layout of a table's rows, in memory and in segment files."""

from dataclasses import dataclass, field

import numpy as np

from hpc_ctr.errors import UsageError

# in front of every stored record: key uint64, check uint32, t uint32
STORED_PREFIX_BYTES = 16
# between that and x, in tables with a lifecycle: shows and clicks in UNITs, and the sample count by which the row was
# last seen. Whole numbers, because sums must be the same bits however a period is cut into passes
LIFE = np.dtype([("show", "<u4"), ("click", "<u4"), ("last", "<u8")])
UNIT = 1 / 256
LATER = 2**63 - 1  # a sample count that never comes


@dataclass(frozen=True)
class RecordLayout:
    """A record is ``x[width] | state[state]`` of one floating type; t is kept beside it.

    width: floats of the embedding (and its first-order weight, where a table has one); state: floats that the
    row optimizer keeps; dtype: float32 or float64; lifecycle: rows carry LIFE in front of the record.

    The stores take and give rows as records, [n, floats] of dtype, C-contiguous. With a lifecycle they are uint32
    [n, words], of which ``records`` and ``life`` are views.
    """

    width: int
    state: int
    dtype: np.dtype = field(default=np.dtype(np.float32))
    lifecycle: bool = False

    def __post_init__(self):
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise UsageError(f"a table's rows are float32 or float64, not {self.dtype}")
        if self.width < 0 or self.state < 0 or self.width + self.state == 0:
            raise UsageError(f"a record of {self.width} + {self.state} floats has no room for a row")

    @property
    def floats(self) -> int:
        """Floats of a record, x and state."""
        return self.width + self.state

    @property
    def record_bytes(self) -> int:
        """Bytes of a record without padding."""
        return self.floats * self.dtype.itemsize

    @property
    def words(self) -> int:
        """32-bit words of a record, and of its lifecycle, without padding."""
        return (self._life_bytes + self.record_bytes) // 4

    @property
    def _life_bytes(self) -> int:
        return LIFE.itemsize if self.lifecycle else 0

    @property
    def stride_bytes(self) -> int:
        """Bytes from one record to the next in the host cache's slab, a multiple of 16."""
        return -(-self.words * 4 // 16) * 16

    @property
    def stored_bytes(self) -> int:
        """Bytes of a row in a segment file."""
        return STORED_PREFIX_BYTES + self.words * 4

    @property
    def stored_dtype(self) -> np.dtype:
        """The compound type of the dataset ``rows`` of a segment file; x or state is left out where it is
        empty."""
        little = self.dtype.newbyteorder("<")
        fields = [("key", "<u8"), ("check", "<u4"), ("t", "<u4")]
        fields += LIFE.descr if self.lifecycle else []
        parts = (("x", self.width), ("state", self.state))
        fields += [(name, little, (size,)) for name, size in parts if size]
        return np.dtype(fields)

    def describe(self) -> str:
        """``16 + 32 float32``."""
        return f"{self.width} + {self.state} {self.dtype.name}" + (" with a lifecycle" if self.lifecycle else "")

    def empty(self, n: int) -> np.ndarray:
        """Memory for ``n`` rows, as the stores take and give them."""
        return np.empty((n, self.words), np.uint32) if self.lifecycle else np.empty((n, self.floats), self.dtype)

    def records(self, rows: np.ndarray) -> np.ndarray:
        """The records of rows, [n, floats]: a view."""
        return rows[:, self._life_bytes // 4:].view(self.dtype) if self.lifecycle else rows

    def life(self, rows: np.ndarray) -> np.ndarray:
        """The lifecycle of rows, LIFE [n]: a view. Only for layouts with a lifecycle."""
        return rows[:, :LIFE.itemsize // 4].view(LIFE).reshape(len(rows))


def as_words(records: np.ndarray, layout: RecordLayout) -> np.ndarray:
    """The same memory as uint32 [n, words]; ``records`` is C-contiguous and as the layout says.

    Raises ValueError when it is not.
    """
    if layout.lifecycle:
        if records.dtype != np.uint32 or records.ndim != 2 or records.shape[1] != layout.words:
            raise ValueError(f"rows with a lifecycle must be uint32 [n, {layout.words}], not "
                             f"{records.dtype} {list(records.shape)}")
    elif records.dtype != layout.dtype or records.ndim != 2 or records.shape[1] != layout.floats:
        raise ValueError(f"records must be {layout.dtype.name} [n, {layout.floats}], not "
                         f"{records.dtype} {list(records.shape)}")
    if not records.flags.c_contiguous:
        raise ValueError("records must be C-contiguous")
    return records.view(np.uint32).reshape(len(records), layout.words)


def as_keys(keys: np.ndarray) -> np.ndarray:
    """``keys`` as a contiguous uint64 [n]; ValueError when they are of another type."""
    keys = np.asarray(keys)
    if keys.dtype != np.uint64 or keys.ndim != 1:
        raise ValueError(f"keys must be uint64 [n], not {keys.dtype} {list(keys.shape)}")
    return np.ascontiguousarray(keys)
