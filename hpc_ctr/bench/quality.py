"""Evidence of quality: test AUC beside a converged logistic regression on the same rows, on several rank counts."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr import config as job_file
from hpc_ctr.bench.common import Results, train_on
from hpc_ctr.data.batch import Batch
from hpc_ctr.data.source import open_source
from hpc_ctr.errors import UsageError

# Learning rates and epochs that reach the plateau on the generated data.
LR_SETTINGS: dict[str, Any] = {"data.batch_size": 2048, "data.epochs": 2, "embedding.lr": 3e-3, "dense.lr": 3e-3}
PAIR_SETTINGS: dict[str, Any] = {"data.batch_size": 2048, "data.epochs": 2, "embedding.lr": 2e-3, "dense.lr": 1e-3}


def movielens(results: Results, job: Path, ranks: list[int], seeds: list[int]) -> None:
    """DeepFM of ``job`` on MovieLens-100K on each rank count, ``seeds`` times, beside logistic regression."""
    config = job_file.load(job)
    with tempfile.TemporaryDirectory(prefix="hpc_ctr-bench-") as scratch:
        train, test = _rows(config, "train"), _rows(config, "test")
        best, by_c = logistic_regression(train, test)
        results.add("movielens", "logistic_regression", "test AUC", [best])
        print("  by C: " + ", ".join(f"{c:g}: {auc:.4f}" for c, auc in by_c.items()))
        for n in ranks:
            runs = [train_on(n, job, Path(scratch) / "run", {"seed": seed})["test_auc"] for seed in seeds]
            results.add("movielens", f"{config.model.name}_{n}_ranks", "test AUC", runs)
            mean = sum(runs) / len(runs)
            print(f"  mean {mean:.4f}, {mean - best:+.4f} beside logistic regression")


def synthetic(results: Results, folder: Path, rows: int, ranks: int, models: list[str], lr_settings: dict[str, Any],
              pair_settings: dict[str, Any]) -> None:
    """lr on data of a linear click model; lr, deepfm, dlrm on data with pairwise terms; beside logistic regression."""
    from hpc_ctr.data.synthetic import SyntheticOptions, write_synthetic

    for kind in ("linear", "pairwise"):
        where = folder / kind
        facts_file = where / "synthetic.json"
        if not facts_file.exists() or json.loads(facts_file.read_text())["rows"] != rows:
            write_synthetic(SyntheticOptions(rows=rows, test_rows=rows // 10, fields=26, ids=10_000, zipf=1.05, dense=13,
                                             model=kind, seed=1), where)
        facts = json.loads(facts_file.read_text())
        results.add(f"synthetic_{kind}", "best_possible", "test AUC", [facts["best_auc"]])
        config = job_file.load(where / "job.yaml")
        best, by_c = logistic_regression(_rows(config, "train"), _rows(config, "test"))
        results.add(f"synthetic_{kind}", "logistic_regression", "test AUC", [best])
        print("  by C: " + ", ".join(f"{c:g}: {auc:.4f}" for c, auc in by_c.items()))
        for model in ("lr",) if kind == "linear" else models:
            settings = {"model.name": model, **(lr_settings if model == "lr" else pair_settings)}
            auc = train_on(ranks, where / "job.yaml", folder / "run", settings)["test_auc"]
            results.add(f"synthetic_{kind}", f"{model}_{ranks}_ranks", "test AUC", [auc])
            print(f"  {auc - best:+.4f} beside logistic regression")


def logistic_regression(train: Any, test: Any, cs: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0)) -> tuple[float, dict]:
    """Best test AUC over the L2 strengths 1/C, each fitted to convergence, and the AUC of each C.

    Choosing C on the test rows favours the regression, so that beating it means something.
    """
    try:
        from scipy import sparse
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import roc_auc_score
    except ImportError as error:
        raise UsageError("bench: scikit-learn is not installed; run bash scripts/setup.sh --bench") from error
    (keys, sizes, dense, label), (test_keys, test_sizes, test_dense, test_label) = train, test
    columns = np.unique(keys)
    mean, std = dense.mean(0), dense.std(0) + 1e-12

    def matrix(keys: np.ndarray, sizes: np.ndarray, dense: np.ndarray) -> Any:
        at = np.searchsorted(columns, keys).clip(0, len(columns) - 1)
        known = (columns[at] == keys).astype(np.float64)  # unknown keys weigh nothing
        one_hot = sparse.csr_matrix((known, at, np.concatenate([[0], np.cumsum(sizes)])), (len(sizes), len(columns)))
        return sparse.hstack([one_hot, sparse.csr_matrix((dense - mean) / std)]).tocsr()

    x, x_test = matrix(keys, sizes, dense), matrix(test_keys, test_sizes, test_dense)
    model = LogisticRegression(max_iter=1000, tol=1e-5, warm_start=True)
    by_c = {}
    for c in cs:
        model.set_params(C=c).fit(x, label)
        by_c[c] = float(roc_auc_score(test_label, model.decision_function(x_test)))
    return max(by_c.values()), by_c


def _rows(config: Any, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All rows of a part through the project's own reader: keys row by row, keys a row, dense, label."""
    keys, sizes, dense, label = [], [], [], []
    source = open_source(config.data, config.seed, None, part)
    stream = source.stream(None)
    for batch in stream:
        k, n = _row_major(batch, len(source.fields))
        keys.append(k)
        sizes.append(n)
        dense.append(batch.dense)
        label.append(batch.label)
    return np.concatenate(keys), np.concatenate(sizes), np.concatenate(dense), np.concatenate(label)


def _row_major(batch: Batch, fields: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch's keys ordered by sample, and the number of keys of each sample."""
    lengths = np.diff(batch.offsets)
    sample = np.tile(np.arange(batch.size), fields)
    return (batch.keys[np.argsort(np.repeat(sample, lengths), kind="stable")],
            lengths.reshape(fields, batch.size).sum(0))
