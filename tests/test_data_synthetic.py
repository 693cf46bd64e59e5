"""Generated clicks: the same for a seed, with the frequencies and the rate asked for, and the best AUC right."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from data_common import read_all

from hpc_ctr.data import synthetic
from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.source import open_source
from hpc_ctr.data.synthetic import BestScores, ClickModel, SyntheticOptions, write_synthetic
from hpc_ctr.errors import DataError, UsageError

SMALL = SyntheticOptions(rows=3000, test_rows=1000, fields=5, ids=60, dense=3, seed=4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(synthetic, "_CHUNK", 1 << 11)


def auc(score: np.ndarray, label: np.ndarray) -> float:
    order = np.argsort(score, kind="stable")
    ranks = np.empty(len(score))
    ranks[order] = np.arange(1, len(score) + 1)
    positive = label.astype(bool)
    return (ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / (positive.sum() * (~positive).sum())


def test_files_job_and_notes(tmp_path: Path) -> None:
    done = []
    summary = write_synthetic(SMALL, tmp_path / "a", lambda rows, total: done.append((rows, total)))
    assert done[-1] == (4000, 4000)
    assert json.loads((tmp_path / "a/synthetic.json").read_text()) == summary
    assert summary["settings"] == dataclasses.asdict(SMALL)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["job.yaml", "synthetic.json", "test.tsv", "train.tsv"]
    job = yaml.safe_load((tmp_path / "a/job.yaml").read_text())["data"]
    opts = DataOptions.from_dict({**job, "base_dir": str(tmp_path / "a"), "shuffle": False})
    for part, rows in (("train", 3000), ("test", 1000)):
        source = open_source(opts, 1, None, part)
        label = np.concatenate([b.label for b in read_all(source)])
        assert len(label) == rows and source.bad_rows.count == 0 and len(source.fields) == 5 and source.num_dense == 3
        assert summary[part]["click_rate"] == pytest.approx(label.mean())
    write_synthetic(SMALL, tmp_path / "b")
    assert (tmp_path / "a/train.tsv").read_bytes() == (tmp_path / "b/train.tsv").read_bytes()
    write_synthetic(dataclasses.replace(SMALL, rows=2500), tmp_path / "b")       # fewer rows: the same beginning
    assert (tmp_path / "a/train.tsv").read_bytes().startswith((tmp_path / "b/train.tsv").read_bytes())
    write_synthetic(dataclasses.replace(SMALL, seed=5), tmp_path / "b")
    assert (tmp_path / "a/train.tsv").read_bytes() != (tmp_path / "b/train.tsv").read_bytes()


def test_what_is_there_already_stays_and_what_is_damaged_is_made_anew(tmp_path: Path) -> None:
    first = write_synthetic(SMALL, tmp_path)
    calls = []
    assert write_synthetic(SMALL, tmp_path, lambda *a: calls.append(a)) == first and not calls
    (tmp_path / "test.tsv").write_text("cut")
    assert write_synthetic(SMALL, tmp_path, lambda *a: calls.append(a)) == first and calls


def test_best_auc_is_that_of_the_true_logit() -> None:
    model = ClickModel(dataclasses.replace(SMALL, noise=0.7))
    scores, logits, labels = BestScores(0.7), [], []
    for chunk in range(20):
        clicks = model.draw(2, chunk, 2048)
        scores.add(clicks)
        logits.append(clicks.logit)
        labels.append(clicks.label)
    logit, label = np.concatenate(logits), np.concatenate(labels)
    result = scores.result()
    assert result["best_auc"] == pytest.approx(auc(logit, label), abs=1e-5)
    assert result["click_rate"] == pytest.approx(0.25, abs=0.03)
    assert result["expected_auc"] == pytest.approx(result["best_auc"], abs=0.015)
    quiet = BestScores(0.0)
    clicks = ClickModel(SMALL).draw(1, 0, 2048)
    quiet.add(clicks)
    p = 1 / (1 + np.exp(-clicks.logit))
    exact = -np.where(clicks.label == 1, np.log(p), np.log(1 - p)).mean()
    assert quiet.result()["best_logloss"] == pytest.approx(exact, abs=1e-4)
    assert BestScores(0).result()["best_auc"] is None


def test_ids_follow_the_power_law_and_the_terms_have_their_size(monkeypatch) -> None:
    monkeypatch.setattr(synthetic, "_CHUNK", 1 << 15)
    n = 1 << 15
    parts = {}
    for kind in ("linear", "pairwise"):
        opts = SyntheticOptions(fields=26, ids=10_000, model=kind, missing=0.0)
        parts[kind] = ClickModel(opts).draw(1, 0, n)
    clicks = parts["linear"]
    assert np.array_equal(clicks.ids, parts["pairwise"].ids) and np.array_equal(clicks.dense, parts["pairwise"].dense)
    assert clicks.ids.max() > 0xF0000000 and clicks.ids.min() >= 0
    seen = [np.sort(np.unique(column, return_counts=True)[1])[::-1] for column in clicks.ids.T]
    p = np.arange(1, 386) ** -1.05
    p /= p.sum()
    for counts in seen:
        assert len(counts) <= 385 and abs(counts[0] / n - p[0]) < 0.01 and abs(counts[9] / n - p[9]) < 0.004
    assert len(np.unique(clicks.ids)) > 9_000                # no id in two fields
    assert clicks.logit.std() == pytest.approx(0.9, rel=0.1)
    pair = parts["pairwise"].logit - clicks.logit
    assert pair.std() == pytest.approx(0.8, rel=0.15)
    # no field alone tells anything about the pair term
    for column in clicks.ids.T[:5]:
        top = np.unique(column)[np.argmax(np.unique(column, return_counts=True)[1])]
        assert abs(pair[column == top].mean() - pair.mean()) < 0.05


def test_missing_cells() -> None:
    clicks = ClickModel(dataclasses.replace(SMALL, missing=0.5)).draw(1, 0, 2048)
    assert (clicks.ids == -1).mean() == pytest.approx(0.5, abs=0.03)
    assert (clicks.dense == -1).mean() == pytest.approx(0.5, abs=0.03)
    assert np.isfinite(clicks.logit).all()


@pytest.mark.parametrize("more", [{"fields": 0, "model": "linear"}, {"dense": 0}, {"test_rows": 0}, {"fields": 60},
                                  {"missing": 0.0, "noise": 1.0}])
def test_small_shapes(tmp_path: Path, more: dict) -> None:
    opts = dataclasses.replace(SMALL, **more)
    summary = write_synthetic(opts, tmp_path)
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())["data"]
    source = open_source(DataOptions.from_dict({**job, "base_dir": str(tmp_path)}), 1)
    assert sum(b.size for b in read_all(source)) == 3000 and source.bad_rows.count == 0
    assert 0.5 < summary["best_auc"] < 1


@pytest.mark.parametrize("more, wanted", [
    ({"rows": 0}, "--rows: 0 must be at least 1"), ({"model": "cubic"}, "--model: 'cubic' is not one of"),
    ({"ids": 3}, "--ids: 3 must be at least one a field"), ({"fields": 1}, "--fields: pairwise needs at least two"),
    ({"missing": 1.0}, "--missing: 1.0 must lie between"), ({"noise": -1.0}, "--noise: -1.0"),
    ({"fields": 0, "dense": 0, "model": "linear"}, "--fields: with --dense 0")])
def test_wrong_options(tmp_path: Path, more: dict, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        write_synthetic(dataclasses.replace(SMALL, **more), tmp_path)


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--out: .* free, and the files take about .*; choose another disk"):
        write_synthetic(dataclasses.replace(SMALL, rows=10**13), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"--out: .* cannot be written"):
        write_synthetic(SMALL, tmp_path / "file")
