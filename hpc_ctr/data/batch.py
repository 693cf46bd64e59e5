"""One rank's samples of one step, jagged and field-major."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """B samples with D dense columns and F categorical fields.

    label: float32 [B]. dense: float32 [B, D].
    keys: uint64 [nnz], field-major: all bags of field 0, then of field 1, and so on.
    offsets: int64 [F*B + 1]; bag (f, b) is ``keys[offsets[f*B + b]:offsets[f*B + b + 1]]`` and may be empty.
    """

    label: np.ndarray
    dense: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray

    @property
    def size(self) -> int:
        """Number of samples B."""
        return len(self.label)

    @property
    def nbytes(self) -> int:
        """Host memory that the arrays take."""
        return self.label.nbytes + self.dense.nbytes + self.keys.nbytes + self.offsets.nbytes

    @staticmethod
    def empty(num_dense: int) -> "Batch":
        """A batch without samples: what a rank that ran out of data trains on."""
        return Batch(np.zeros(0, np.float32), np.zeros((0, num_dense), np.float32),
                     np.zeros(0, np.uint64), np.zeros(1, np.int64))
