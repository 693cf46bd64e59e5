"""Synthetic clicks from a known model, in Criteo format: any number of rows, and the best AUC that is possible on them.

Ids follow a power law within each field; dense columns are log-normal counts. The logit of a click is a bias plus a
weight an id plus weights on the standardised log1p of the counts (``linear``); ``pairwise`` adds the inner products of
latent vectors of all pairs of fields. Weights and latent vectors have mean zero over a field's ids (as often as they
occur), so that no linear model can see any of the pair term, and a term's standard deviation is what the options say.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpc_ctr.data.schema import Schema, check_choice
from hpc_ctr.errors import DataError, UsageError
from hpc_ctr.units import format_bytes

MODELS = ("linear", "pairwise")
_CHUNK = 1 << 16                     # rows; part of the recipe: the random numbers are drawn a chunk at a time
_BINS, _LIMIT = 1 << 20, 32.0        # of the histogram of logits
_MODEL, _TRAIN, _TEST, _CALIBRATE = range(4)


@dataclass(frozen=True)
class SyntheticOptions:
    """ids: in all, shared out evenly over the fields. zipf: exponent of the ids' frequency. seed: of everything.

    missing: share of empty cells. click_rate: mean. linear_std, pair_std: standard deviations of the two terms of the
    logit; noise: of what no model can know. latent: length of the latent vectors.
    """

    rows: int = 2_000_000
    test_rows: int = 200_000
    fields: int = 26
    ids: int = 10_000
    zipf: float = 1.05
    dense: int = 13
    model: str = "pairwise"
    seed: int = 1
    missing: float = 0.03
    click_rate: float = 0.25
    linear_std: float = 0.9
    pair_std: float = 0.8
    latent: int = 4
    noise: float = 0.0

    def validate(self) -> None:
        """Raises UsageError, which names the option."""
        check_choice(self.model, MODELS, "--model")
        for name, low in (("rows", 1), ("test_rows", 0), ("fields", 0), ("dense", 0), ("latent", 1), ("seed", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"--{name.replace('_', '-')}: {getattr(self, name)} must be at least {low}")
        if not 1 <= self.fields + self.dense:
            raise UsageError("--fields: with --dense 0 there must be at least one field")
        if not self.fields <= self.ids < 2**32:
            raise UsageError(f"--ids: {self.ids} must be at least one a field ({self.fields}) and below 2^32")
        if self.model == "pairwise" and self.fields < 2:
            raise UsageError("--fields: pairwise needs at least two")
        for name, low, high in (("missing", 0, 0.9), ("click_rate", 0.001, 0.999), ("zipf", 0, 10),
                                ("linear_std", 0, 5), ("pair_std", 0, 5), ("noise", 0, 5)):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"--{name.replace('_', '-')}: {getattr(self, name)} must lie between {low} and {high}")


@dataclass(frozen=True)
class Clicks:
    """n rows. label: uint8 [n]. dense: int64 [n, D], ids: int64 [n, F] below 2^32; -1 = empty cell.

    logit: float64 [n], without the noise.
    """

    label: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    logit: np.ndarray


class ClickModel:
    """The model that the options and their seed stand for."""

    def __init__(self, options: SyntheticOptions):
        self.options = o = options
        rng = _rng(o.seed, _MODEL)
        sizes = [o.ids // o.fields + (f < o.ids % o.fields) for f in range(o.fields)]
        self._first = np.cumsum([0, *sizes])
        self._cdf, self._weights, self._latent = [], [], []
        variance = 0.0
        moments = []
        for size in sizes:
            p = np.arange(1, size + 1) ** -float(o.zipf)
            p /= p.sum()
            weights, latent = rng.standard_normal(size), rng.standard_normal((size, o.latent))
            weights -= p @ weights
            latent -= p @ latent
            variance += p @ weights**2
            moments.append((latent.T * p) @ latent)
            self._cdf.append(np.cumsum(p)[:-1])
            self._weights.append(weights)
            self._latent.append(latent)
        # of the linear term, two thirds of the variance come from the ids where there are both
        share = (2 / 3 if o.dense else 1.0) if o.fields else 0.0
        present = 1 - o.missing
        scale = o.linear_std * np.sqrt(share / max(variance * present, 1e-12))
        self._weights = [w * scale for w in self._weights]
        total = sum(moments) if moments else np.zeros((1, 1))
        pairs = (np.sum(total * total) - sum(np.sum(m * m) for m in moments)) / 2 * present**2
        strength = np.sqrt(o.pair_std / max(np.sqrt(max(pairs, 0)), 1e-12)) if o.model == "pairwise" else 0.0
        self._latent = [v * strength for v in self._latent]
        self._mean, self._spread = rng.uniform(0, 3, o.dense), rng.uniform(0.7, 1.5, o.dense)
        self._dense_weights = rng.standard_normal(o.dense)
        self._bias, self._shift = 0.0, np.zeros(o.dense)
        self._calibrate(o.linear_std * np.sqrt(1 - share) if o.dense else 0.0)

    def _calibrate(self, dense_std: float) -> None:
        """Standardises the dense columns, and finds the bias that gives the click rate."""
        o = self.options
        rng = _rng(o.seed, _CALIBRATE)
        if o.dense:
            values = np.log1p(np.maximum(self._counts(rng, _CHUNK), 0))
            self._shift = values.mean(0)
            self._dense_weights = self._dense_weights / np.maximum(values.std(0), 1e-12)
            term = (values - self._shift) @ self._dense_weights
            self._dense_weights *= dense_std / max(term.std(), 1e-12)
        logit = self._logit(self._counts(rng, _CHUNK), self._ranks(rng, _CHUNK))
        logit = logit + o.noise * rng.standard_normal(_CHUNK)
        low, high = -30.0, 30.0
        for _ in range(60):
            self._bias = (low + high) / 2
            if _sigmoid(logit + self._bias).mean() < o.click_rate:
                low = self._bias
            else:
                high = self._bias

    def _counts(self, rng: np.random.Generator, n: int) -> np.ndarray:
        counts = np.exp(rng.standard_normal((n, self.options.dense)) * self._spread + self._mean)
        counts = np.minimum(counts, 1e9).astype(np.int64)
        counts[rng.random(counts.shape) < self.options.missing] = -1
        return counts

    def _ranks(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """int64 [n, F]: each field's id by frequency from 0; -1 = empty."""
        ranks = np.empty((n, self.options.fields), np.int64)
        for f, cdf in enumerate(self._cdf):
            ranks[:, f] = np.searchsorted(cdf, rng.random(n), side="right")
        ranks[rng.random(ranks.shape) < self.options.missing] = -1
        return ranks

    def _logit(self, counts: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Empty ids add nothing; an empty count reads as 0, as it does for the models."""
        o = self.options
        logit = np.full(len(ranks), self._bias)
        logit += (np.log1p(np.maximum(counts, 0)) - self._shift) @ self._dense_weights
        total = np.zeros((len(ranks), o.latent))
        for f in range(o.fields):
            rank = ranks[:, f]
            there = (rank >= 0).astype(np.float64)
            logit += self._weights[f][rank] * there
            if o.model == "pairwise":
                vector = self._latent[f][rank] * there[:, None]
                logit += np.einsum("nk,nk->n", total, vector)
                total += vector
        return logit

    def draw(self, part: int, chunk: int, n: int) -> Clicks:
        """The first ``n`` rows (at most 65,536) of chunk ``chunk`` of part 1 (train) or 2 (test)."""
        rng = _rng(self.options.seed, part, chunk)
        counts, ranks = self._counts(rng, _CHUNK), self._ranks(rng, _CHUNK)
        logit = self._logit(counts, ranks)
        noisy = logit + self.options.noise * rng.standard_normal(_CHUNK) if self.options.noise else logit
        label = (rng.random(_CHUNK) < _sigmoid(noisy)).astype(np.uint8)
        ids = _scatter(ranks + self._first[:-1])
        ids[ranks < 0] = -1
        return Clicks(label[:n], counts[:n], ids[:n], logit[:n])


def _rng(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(list(words))))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _scatter(ids: np.ndarray) -> np.ndarray:
    """Bijection of 32-bit ids onto all 8 hex digits, so that ids look as they do in the logs."""
    x = ids.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    for factor in (0x7FEB352D, 0x846CA68B):
        x ^= x >> np.uint64(16)
        x = (x * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return (x ^ (x >> np.uint64(15))).astype(np.int64)


def field_ids(options: SyntheticOptions, field: int, first: int = 0, step: int = 1) -> np.ndarray:
    """Ids int64 [m] of a field as they stand in the files, most frequent first; of them every ``step``-th from
    ``first`` on."""
    size = options.ids // options.fields
    begin = field * size + min(field, options.ids % options.fields)
    return _scatter(begin + np.arange(first, size + (field < options.ids % options.fields), step))


class BestScores:
    """What the true model scores on rows it made: a histogram of its logits, so that any number of rows fits."""

    def __init__(self, noise: float):
        self._rows, self._clicks = np.zeros(_BINS), np.zeros(_BINS)
        self._noise = noise

    def add(self, clicks: Clicks) -> None:
        """Counts some rows."""
        at = (clicks.logit + _LIMIT) * (_BINS / (2 * _LIMIT))
        at = np.clip(at.astype(np.int64), 0, _BINS - 1)
        self._rows += np.bincount(at, minlength=_BINS)
        self._clicks += np.bincount(at, weights=clicks.label, minlength=_BINS)

    def result(self) -> dict[str, float | None]:
        """click_rate; best_auc: of the true probability on the labels drawn; expected_auc: on average over labels that
        could have been drawn; best_logloss. None where there are no rows, or no two classes."""
        n, clicks = self._rows.sum(), self._clicks.sum()
        if not n:
            return {"click_rate": None, "best_auc": None, "expected_auc": None, "best_logloss": None}
        centre = (np.arange(_BINS) + 0.5) * (2 * _LIMIT / _BINS) - _LIMIT
        node, weight = np.polynomial.hermite_e.hermegauss(24 if self._noise else 1)
        p = sum(w * _sigmoid(centre + self._noise * x) for x, w in zip(node, weight, strict=True)) / weight.sum()
        p = np.clip(p, 1e-15, 1 - 1e-15)
        quiet = self._rows - self._clicks
        return {"click_rate": clicks / n, "best_auc": _auc(self._clicks, quiet),
                "expected_auc": _auc(self._rows * p, self._rows * (1 - p)),
                "best_logloss": float(-(self._clicks @ np.log(p) + quiet @ np.log1p(-p)) / n)}


def _auc(positive: np.ndarray, negative: np.ndarray) -> float | None:
    """AUC from the two classes' histograms over rising scores; within a bin half."""
    if not positive.sum() or not negative.sum():
        return None
    below = np.cumsum(negative) - negative / 2
    return float(positive @ below / (positive.sum() * negative.sum()))


def write_synthetic(options: SyntheticOptions, out: str | os.PathLike[str],
                    progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Writes train.tsv, test.tsv, job.yaml and last synthetic.json into the folder ``out``; returns what that holds.

    Files appear complete, by rename. A folder that holds the same data already is left as it is. progress: called
    with (rows done, rows in all). Raises UsageError for options, DataError when the disk is full or not writable.
    """
    options.validate()
    note = os.path.join(out, "synthetic.json")
    known = _known(note, options, out)
    if known is not None:
        return known
    try:
        os.makedirs(out, exist_ok=True)
        need = (options.rows + options.test_rows) * (2 + 4 * options.dense + 9 * options.fields)
        free = shutil.disk_usage(out).free
        if need > free:
            raise DataError(f"--out: {out} has {format_bytes(free)} free, and the files take about "
                            f"{format_bytes(need)}; choose another disk or fewer --rows")
        if os.path.exists(note):
            os.remove(note)
        summary = _write(options, out, progress)
        _replace(note, lambda file: file.write(json.dumps(summary, indent=2).encode() + b"\n"))
    except OSError as error:
        raise DataError(f"--out: {out} cannot be written: {error.strerror or error}; "
                        "choose a folder on a disk with room") from error
    return summary


def _replace(path: str, fill: Callable[[Any], Any]) -> None:
    """The file ``path``, which appears when ``fill`` has written all of it; nothing stays of one that failed."""
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


def _known(note: str, options: SyntheticOptions, out: str) -> dict[str, Any] | None:
    try:
        with open(note, encoding="utf-8") as file:
            known = json.load(file)
        same = known["settings"] == asdict(options)
        sizes = all(os.path.getsize(os.path.join(out, name)) == size for name, size in known["files"].items())
        return known if same and sizes and os.path.exists(os.path.join(out, "job.yaml")) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(options: SyntheticOptions, out: str, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    # not at the top: the command line reads the options above at every start, and must not wait for numba
    from hpc_ctr.kernels.parse import format_criteo

    model = ClickModel(options)
    total, done = options.rows + options.test_rows, 0
    summary: dict[str, Any] = {"settings": asdict(options), "rows": options.rows, "test_rows": options.test_rows}
    buffer = np.empty(_CHUNK * (2 + 11 * options.dense + 9 * options.fields), np.uint8)
    files: dict[str, int] = {}
    for name, part, rows in (("train", _TRAIN, options.rows), ("test", _TEST, options.test_rows)):
        scores = BestScores(options.noise)

        def fill(file, part: int = part, rows: int = rows, scores: BestScores = scores) -> None:
            nonlocal done
            for chunk, at in enumerate(range(0, rows, _CHUNK)):
                clicks = model.draw(part, chunk, min(_CHUNK, rows - at))
                scores.add(clicks)
                file.write(memoryview(buffer)[:format_criteo(clicks.label, clicks.dense, clicks.ids, buffer)])
                done += len(clicks.label)
                if progress is not None:
                    progress(done, total)

        if rows:
            path = os.path.join(out, f"{name}.tsv")
            _replace(path, fill)
            files[f"{name}.tsv"] = os.path.getsize(path)
        summary[name] = scores.result()
    judged = summary["test" if options.test_rows else "train"]
    summary |= {"click_rate": summary["train"]["click_rate"], "best_auc": judged["best_auc"],
                "expected_auc": judged["expected_auc"], "best_logloss": judged["best_logloss"], "files": files}
    _replace(os.path.join(out, "job.yaml"), lambda file: file.write(_job(options).encode()))
    return summary


def _job(options: SyntheticOptions) -> str:
    lines = ["# hpc-ctr train job.yaml", "data:", "  format: criteo", "  files: [train.tsv]"]
    if options.test_rows:
        lines += ["  test_files: [test.tsv]", "  split: {by: files}"]
    if (options.dense, options.fields) != (13, 26):
        schema = Schema.criteo(options.dense, options.fields)
        lines += ["  schema:", "    label: label", "    dense:" + ("" if schema.dense else " []")]
        lines += [f"      - {{column: {c.column}, transform: {c.transform}}}" for c in schema.dense]
        lines += ["    categorical:" + ("" if schema.categorical else " []")]
        lines += [f"      - {c.column}" for c in schema.categorical]
    return "\n".join(lines) + "\n"
