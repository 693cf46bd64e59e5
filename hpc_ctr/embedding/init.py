"""Initial values of rows."""

import numpy as np

from hpc_ctr.kernels.records import init_values


def init_rows(keys: np.ndarray, seed: int, width: int, dim: int, scale: float,
              dtype: np.dtype | str = np.float32) -> np.ndarray:
    """x of new rows: [n, width] of ``dtype`` for keys uint64 [n], from (seed, key) alone.

    The first ``dim`` columns are uniform in [-scale, scale); the rest (first-order weights) is zero.
    """
    out = np.empty((len(keys), width), dtype)
    init_values(np.ascontiguousarray(keys, np.uint64), np.uint64(seed & 0xFFFFFFFFFFFFFFFF), scale, dim, out)
    return out
