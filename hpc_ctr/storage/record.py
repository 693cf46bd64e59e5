"""The layout of a table's rows, in memory and in segment files."""

from dataclasses import dataclass, field

import numpy as np

from hpc_ctr.errors import UsageError

# in front of every stored record: key uint64, check uint32, t uint32
STORED_PREFIX_BYTES = 16


@dataclass(frozen=True)
class RecordLayout:
    """A record is ``x[width] | state[state]`` of one floating type; t is kept beside it.

    width: floats of the embedding (and its first-order weight, where a table has one); state: floats that the
    row optimizer keeps; dtype: float32 or float64.
    """

    width: int
    state: int
    dtype: np.dtype = field(default=np.dtype(np.float32))

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
        """32-bit words of a record without padding."""
        return self.record_bytes // 4

    @property
    def stride_bytes(self) -> int:
        """Bytes from one record to the next in the host cache's slab, a multiple of 16."""
        return -(-self.record_bytes // 16) * 16

    @property
    def stored_bytes(self) -> int:
        """Bytes of a row in a segment file."""
        return STORED_PREFIX_BYTES + self.record_bytes

    @property
    def stored_dtype(self) -> np.dtype:
        """The compound type of the dataset ``rows`` of a segment file; x or state is left out where it is
        empty."""
        little = self.dtype.newbyteorder("<")
        fields = [("key", "<u8"), ("check", "<u4"), ("t", "<u4")]
        parts = (("x", self.width), ("state", self.state))
        fields += [(name, little, (size,)) for name, size in parts if size]
        return np.dtype(fields)

    def describe(self) -> str:
        """``16 + 32 float32``."""
        return f"{self.width} + {self.state} {self.dtype.name}"


def as_words(records: np.ndarray, layout: RecordLayout) -> np.ndarray:
    """The same memory as uint32 [n, words]; ``records`` is C-contiguous [n, floats] of the layout's type.

    Raises ValueError when it is not.
    """
    if records.dtype != layout.dtype or records.ndim != 2 or records.shape[1] != layout.floats:
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
