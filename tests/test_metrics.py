"""AUC, logloss and calibration from mergeable statistics, against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from hpc_ctr.errors import DataError
from hpc_ctr.metrics import BINS, BinaryStats
from hpc_ctr.metrics.binary import bins_of


def clicks(logits: np.ndarray, seed: int) -> np.ndarray:
    """Labels drawn from the logits, standardised so that AUC is far from 1/2 and from 1."""
    z = (logits - logits.mean()) / (logits.std() or 1)
    return (np.random.default_rng(seed).random(len(z)) < 1 / (1 + np.exp(1.5 - z))).astype(np.float32)


def stats_of(logits, labels, batch: int = 2048) -> BinaryStats:
    stats = BinaryStats()
    for begin in range(0, len(logits), batch):
        stats.add(logits[begin:begin + batch], labels[begin:begin + batch])
    return stats


@pytest.mark.parametrize("centre, spread, samples", [
    (0, 1, 20_000), (-3, 1, 20_000), (-1, 0.3, 50_000), (-3, 0.05, 50_000), (0, 1e-4, 20_000),
    (0, 30, 20_000), (2, 2, 4_000)])
def test_auc_equals_sklearn(centre, spread, samples):
    for seed in range(3):
        logits = np.random.default_rng(seed).normal(centre, spread, samples).astype(np.float32)
        labels = clicks(logits, seed)
        assert stats_of(logits, labels).auc() == pytest.approx(roc_auc_score(labels, logits), abs=1e-5)


@pytest.mark.parametrize("spread", [1e-30, 1e-9, 1e6, 1e30])
def test_auc_of_logits_out_of_all_proportion(spread):
    logits = np.random.default_rng(0).normal(0, spread, 50_000).astype(np.float32)
    labels = clicks(logits.astype(np.float64), 0)
    assert stats_of(logits, labels).auc() == pytest.approx(roc_auc_score(labels, logits), abs=1e-4)


@pytest.mark.parametrize("distinct", [1, 2, 3, 50, 1000])
def test_ties_count_half(distinct):
    rng = np.random.default_rng(distinct)
    levels = rng.normal(-1, 1, distinct).astype(np.float32)
    logits = levels[rng.integers(0, distinct, 5000)]
    labels = clicks(logits, 1)
    want = roc_auc_score(labels, logits) if distinct > 1 else 0.5
    assert stats_of(logits, labels).auc() == pytest.approx(want, abs=1e-6)


def test_auc_by_hand_and_zeros():
    stats = BinaryStats()
    stats.add(np.array([0.0, -0.0, 1.0, -1.0], np.float32), np.array([1, 0, 1, 0]))
    # pairs (1, 0): (0, -0) tie, (0, -1) won, (1, -0) won, (1, -1) won
    assert stats.auc() == 3.5 / 4
    reverse = BinaryStats()
    reverse.add(np.array([-5.0, 5.0]), np.array([1, 0]))
    assert reverse.auc() == 0.0


def test_bins_are_monotone_over_all_floats():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    largest = np.finfo(np.float32).max
    extremes = np.float32([0, -0.0, 1e-45, -1e-45, largest, -largest])
    values = np.concatenate([values[np.isfinite(values)], extremes])
    values.sort()
    bins = bins_of(values)
    assert bins.min() == 0 and bins.max() == BINS - 1 and np.all(np.diff(bins) >= 0)
    centre = np.linspace(-15, 15, 10_001, dtype=np.float32)
    centre = centre[np.abs(centre) > 0.07]
    assert np.all(np.diff(bins_of(centre)) > 0)  # logits that far apart are told apart


def test_state_is_small():
    stats = BinaryStats()
    stats.add(np.zeros(10, np.float32), np.zeros(10))
    assert stats.to_array().nbytes <= 1 << 22 and stats.to_array().shape == (BinaryStats.SIZE,)


@pytest.mark.parametrize("scale", [1, 20, 500])
def test_logloss_and_calibration(scale):
    logits = (scale * np.random.default_rng(0).normal(0, 1, 5000)).astype(np.float32)
    labels = clicks(logits, 0)
    stats = stats_of(logits, labels)
    z = logits.astype(np.longdouble)
    exact = np.mean(np.log1p(np.exp(-np.abs(z))) + np.maximum(z, 0) - labels * z)
    p = 1 / (1 + np.exp(-z))
    assert stats.logloss() == pytest.approx(float(exact), rel=1e-13)
    if scale == 1:
        assert stats.logloss() == pytest.approx(log_loss(labels, p.astype(np.float64)), rel=1e-10)
    assert stats.calibration() == pytest.approx(float(p.mean() / labels.mean(dtype=np.float64)), rel=1e-12)
    assert stats.mean_prediction() == pytest.approx(float(p.mean()), rel=1e-12)
    assert stats.mean_label() == pytest.approx(labels.mean(dtype=np.float64)) and stats.clicks == labels.sum()


def test_merging_is_adding():
    logits = np.random.default_rng(0).normal(-1, 1, 9001).astype(np.float32)
    labels = clicks(logits, 0)
    whole = stats_of(logits, labels)
    parts = [stats_of(logits[r::3], labels[r::3]) for r in range(3)] + [BinaryStats()]
    summed = BinaryStats.from_array(sum(part.to_array() for part in parts))
    merged = BinaryStats()
    for part in parts:
        merged.merge(part)
    for stats in (summed, merged):
        assert np.array_equal(stats.counts, whole.counts) and stats.auc() == whole.auc()
        assert stats.logloss() == pytest.approx(whole.logloss(), rel=1e-13)
        assert stats.calibration() == pytest.approx(whole.calibration(), rel=1e-13)
    mean_of_aucs = np.mean([part.auc() for part in parts[:3]])
    assert mean_of_aucs != whole.auc()
    merged.clear()
    assert merged.samples == 0 and not merged.to_array().any()


def test_round_trip_is_exact():
    stats = stats_of(np.float32([0.1, 2, -3]), np.array([1, 0, 1]))
    again = BinaryStats.from_array(stats.to_array())
    assert np.array_equal(again.to_array(), stats.to_array()) and again.summary() == stats.summary()
    with pytest.raises(ValueError, match="shape"):
        BinaryStats.from_array(np.zeros(3))


def test_large_counts():
    """Billions of samples: the number of pairs does not overflow."""
    stats = stats_of(np.float32([-2, -1, 0, 1]), np.array([0, 1, 0, 1]))
    small = stats.auc()
    stats.counts *= 3_000_000_000
    assert stats.auc() == pytest.approx(small, rel=1e-12) and stats.samples == 12_000_000_000
    assert BinaryStats.from_array(stats.to_array()).samples == stats.samples


@pytest.mark.parametrize("label", [0, 1])
def test_one_class(label):
    stats = BinaryStats()
    assert math.isnan(stats.auc()) and stats.auc_reason == "no samples" and math.isnan(stats.logloss())
    stats.add(np.zeros(0, np.float32), np.zeros(0))
    stats.add(np.float32([0.5, 1.5]), np.full(2, label))
    assert math.isnan(stats.auc())
    assert stats.auc_reason == f"only one class is present: all 2 labels are {label}"
    assert stats.logloss() > 0 and math.isnan(stats.calibration()) == (label == 0)
    assert stats.summary()["auc_reason"] == stats.auc_reason
    stats.add(np.float32([0.0]), np.array([1 - label]))
    assert stats.auc_reason == "" and "auc_reason" not in stats.summary()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_losses_that_are_not_finite(bad, kind):
    stats = BinaryStats()
    with np.errstate(over="ignore"):
        logits = np.array([0.0, bad, 1.0, bad]).astype(kind)
    with pytest.raises(DataError, match="loss is not finite: 2 of 4 logits"):
        stats.add(logits, np.zeros(4))
    assert stats.samples == 0 and stats.loss_sum == 0


def test_labels_must_be_classes():
    with pytest.raises(DataError, match="labels must be 0 or 1, not 4.0"):
        BinaryStats().add(np.zeros(2), np.array([1.0, 4.0]))
    with pytest.raises(ValueError, match="of one dimension and size"):
        BinaryStats().add(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="of one dimension and size"):
        BinaryStats().add(np.zeros((2, 1)), np.zeros((2, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tensors(dtype):
    logits = torch.tensor([0.5, -1.0, 2.0], dtype=dtype, requires_grad=True)
    stats = BinaryStats()
    stats.add(logits, torch.tensor([1.0, 0.0, 0.0]))
    assert stats.auc() == 0.5 and stats.samples == 3
