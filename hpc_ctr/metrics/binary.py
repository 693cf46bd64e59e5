"""AUC, logloss and calibration of click predictions from statistics of fixed size.

Ranks and windows are put together by adding arrays, so a metric over all of them is exact where it can be
(logloss, calibration, counts) and never a mean of means.
"""

import math
from typing import Any

import numpy as np

from hpc_ctr.errors import DataError


def _layout() -> tuple[np.ndarray, np.ndarray, int]:
    """(first bin, dropped mantissa bits) by exponent byte of a float32, and the number of bins of one sign.

    Resolution is spent where logits are: 13 bits of mantissa for magnitudes from 1/16 to 16, 11 or 12 around
    that, 6 elsewhere.
    """
    exponent = np.arange(255) - 127
    bits = np.full(255, 6)
    bits[(exponent >= -18) & (exponent < 8)] = 11
    bits[(exponent >= -8) & (exponent < 4)] = 12
    bits[(exponent >= -4) & (exponent < 4)] = 13
    sizes = 1 << bits
    return (np.cumsum(sizes) - sizes).astype(np.int64), (23 - bits).astype(np.int64), int(sizes.sum())


_FIRST_BIN, _SHIFT, _HALF = _layout()
BINS = 2 * _HALF


class BinaryStats:
    """Statistics of predictions (logits) against labels 0 and 1: 4 MB, whatever the number of samples.

    Logits fall into bins that are ranges of their float32 bit pattern, so equal logits share a bin, and every
    float32 has one. AUC counts pairs across bins exactly and pairs inside a bin as ties: exact when all
    logits of a bin are equal, else off by some 1e-6 for thousands of samples and less for more.
    """

    SIZE = 2 * BINS + 2

    def __init__(self) -> None:
        self.counts = np.zeros((2, BINS), np.int64)  # [label, bin]
        self.loss_sum = 0.0
        self.prediction_sum = 0.0

    def add(self, logits: Any, labels: Any) -> None:
        """Count samples: logits and labels, [B] arrays or tensors.

        Labels are 0 or 1; AUC takes logits as float32. Raises DataError for a logit that is not finite and
        for another label; nothing is counted then.
        """
        logits, labels = _array(logits), _array(labels)
        with np.errstate(over="ignore"):  # what float32 cannot hold is reported as infinite below
            narrow = logits.astype(np.float32)
        if logits.shape != labels.shape or logits.ndim != 1:
            raise ValueError(f"add: logits {logits.shape} and labels {labels.shape} must be of one dimension "
                             "and size")
        bad = int(logits.size - np.isfinite(narrow).sum())
        if bad:
            raise DataError(f"loss is not finite: {bad} of {logits.size} logits are NaN or infinite; lower "
                            "dense.lr or the row learning rate, or look for extreme values in dense columns")
        clicked = labels == 1
        if not np.all(clicked | (labels == 0)):
            strange = labels[~(clicked | (labels == 0))][0]
            raise DataError(f"labels must be 0 or 1, not {strange}; make the label a comparison, such as "
                            "'rating >= 4'")
        np.add.at(self.counts.reshape(-1), bins_of(narrow) + BINS * clicked, 1)
        z = logits.astype(np.float64)
        # log(1 + e^z) - y z and 1/(1 + e^-z), in forms that neither overflow nor cancel.
        self.loss_sum += float(np.sum(np.logaddexp(0.0, np.where(clicked, -z, z))))
        self.prediction_sum += float(np.sum(np.exp(-np.logaddexp(0.0, -z))))

    def merge(self, other: "BinaryStats") -> "BinaryStats":
        """Add another's samples to these; returns self."""
        self.counts += other.counts
        self.loss_sum += other.loss_sum
        self.prediction_sum += other.prediction_sum
        return self

    def clear(self) -> None:
        """Forget all samples."""
        self.counts[:] = 0
        self.loss_sum = self.prediction_sum = 0.0

    def to_array(self) -> np.ndarray:
        """float64 [SIZE] (counts are exact to 2^53); the sum of such arrays stands for all samples."""
        sums = [self.loss_sum, self.prediction_sum]
        return np.concatenate([self.counts.reshape(-1).astype(np.float64), sums])

    @classmethod
    def from_array(cls, array: np.ndarray) -> "BinaryStats":
        """Statistics from ``to_array()``, or from a sum of such arrays."""
        if array.shape != (cls.SIZE,):
            raise ValueError(f"from_array: shape must be ({cls.SIZE},), not {array.shape}")
        stats = cls()
        stats.counts[:] = np.rint(array[:-2]).astype(np.int64).reshape(2, BINS)
        stats.loss_sum, stats.prediction_sum = float(array[-2]), float(array[-1])
        return stats

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.counts.sum())

    @property
    def clicks(self) -> int:
        """Number of samples with label 1."""
        return int(self.counts[1].sum())

    @property
    def auc_reason(self) -> str:
        """Why ``auc()`` is NaN, or ""."""
        if not self.samples:
            return "no samples"
        if self.clicks in (0, self.samples):
            return f"only one class is present: all {self.samples} labels are {int(self.clicks > 0)}"
        return ""

    def auc(self) -> float:
        """Area under the ROC curve, ties at mid-rank; NaN where ``auc_reason`` says why."""
        if self.auc_reason:
            return math.nan
        used = np.flatnonzero(self.counts[0] + self.counts[1])
        below, above = self.counts[0][used].astype(np.float64), self.counts[1][used].astype(np.float64)
        won = np.sum(above * (np.cumsum(below) - 0.5 * below))
        return float(won / (below.sum() * above.sum()))

    def logloss(self) -> float:
        """Mean of -log(probability of the label), in nats; NaN without samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    def mean_prediction(self) -> float:
        """Mean predicted probability; NaN without samples."""
        return self.prediction_sum / self.samples if self.samples else math.nan

    def mean_label(self) -> float:
        """Share of clicks; NaN without samples."""
        return self.clicks / self.samples if self.samples else math.nan

    def calibration(self) -> float:
        """Mean prediction / mean label: 1 is right on average, above 1 too high; NaN without clicks."""
        return self.prediction_sum / self.clicks if self.clicks else math.nan

    def summary(self) -> dict[str, Any]:
        """samples, clicks, auc, logloss, calibration, and auc_reason where AUC is NaN."""
        values = {"samples": self.samples, "clicks": self.clicks, "auc": self.auc(),
                  "logloss": self.logloss(), "calibration": self.calibration()}
        return values | ({"auc_reason": self.auc_reason} if self.auc_reason else {})


def bins_of(logits: np.ndarray) -> np.ndarray:
    """Bin of each finite float32 logit: int64 below BINS, monotone in the logit; -0 and +0 share one."""
    bits = (logits + np.float32(0)).view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    place = _FIRST_BIN[exponent] + ((magnitude & 0x7FFFFF) >> _SHIFT[exponent])
    return np.where(bits >> 31, _HALF - 1 - place, _HALF + place)


def _array(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):  # a torch tensor, on any device; torch itself is not needed here
        values = values.detach()
        values = (values if values.element_size() >= 4 else values.float()).cpu().numpy()
    return np.asarray(values)
