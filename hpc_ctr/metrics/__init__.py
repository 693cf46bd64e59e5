"""Statistics that merge over ranks: AUC, logloss, calibration."""

from hpc_ctr.metrics.binary import BINS, BinaryStats

__all__ = ["BINS", "BinaryStats"]
