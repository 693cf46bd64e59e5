"""The command line as a user meets it: what goes wrong is one sentence and exit code 2, before any
training.
"""

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import REPO, base_job, hpc_ctr, losses_by_step, ok, summary, write_criteo, write_job

ROWS = 3000
CRITEO8K = Path(os.environ.get("HPC_CTR_CRITEO8K", REPO.parent / "shared" / "data" / "criteo8k"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A small file in Criteo's format whose batches have many distinct keys."""
    path = tmp_path_factory.mktemp("data") / "clicks.tsv"
    write_criteo(path, ROWS, 3000, seed=1, zipf=None)
    return path


def assert_usage_error(done, run_dir: Path, *named: str, ranks: int = 1) -> None:
    """Exit code 2, one sentence on stderr that has every pattern of ``named``, nothing trained."""
    output = f"\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 2, f"exit code {done.returncode}{output}"
    assert "Traceback" not in done.stdout + done.stderr, output
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    telling = [line for line in lines if all(re.search(name, line) for name in named)]
    assert len(telling) == 1, f"not one sentence that names {named}{output}"
    if ranks == 1:                                          # mpirun adds words of its own
        assert len(lines) == 1, output
    metrics = run_dir / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text().strip(), "it trained"


WRONG_SETTINGS = {      # what: (sections of the job file, overrides, patterns of the sentence)
    "unknown key": ({"merge": {"kk": 3}}, [], [r"merge\.kk\b", r"merge\.k\b"]),
    "unknown section": ({"embeding": {"dim": 4}}, [], [r"\bembeding\b", r"\bembedding\b"]),
    "unknown override": ({}, ["--train.batches_per_pas", "3"],
                         [r"train\.batches_per_pas\b", r"train\.batches_per_pass\b"]),
    "missing data file": ({"data": {"files": ["absent/clicks.tsv"]}}, [],
                          [r"data\.files", r"absent/clicks\.tsv"]),
    "label column not there": (
        {"data": {"schema": {"label": "bought >= 1", "dense": ["I1"], "categorical": ["C1"]}}}, [],
        [r"data\.schema\.label", r"\bbought\b"]),
    "k = 0": ({}, ["--merge.k", "0"], [r"merge\.k\b"]),
    "k_rows = 0": ({"rows": {"k_rows": 0}}, [], [r"rows\.k_rows\b"]),
    "not a choice": ({}, ["--merge.mode", "adamax"], [r"merge\.mode", r"adamax", r"\badam\b.*\bamsgrad\b"]),
    "not a number": ({}, ["--data.batch_size", "many"], [r"data\.batch_size", r"many"]),
    "not a size": ({"storage": {"host_budget": "plenty"}}, [], [r"storage\.host_budget", r"plenty"]),
    "not even one batch fits": ({}, ["--storage.host_budget", "64KiB"], [r"storage\.host_budget", r"batch"]),
    "hardly anything fits": ({}, ["--storage.host_budget", "4KiB"], [r"storage\.host_budget"]),
    "unknown model": ({}, ["--model.name", "deepfn"], [r"model\.name", r"\bdeepfn\b", r"\bdeepfm\b"]),
}


@pytest.mark.parametrize("what", WRONG_SETTINGS)
def test_wrong_setting(what, data, tmp_path):
    sections, overrides, named = WRONG_SETTINGS[what]
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, data, **sections))
    assert_usage_error(hpc_ctr("train", job, *overrides), tmp_path / "run", *named)


RATINGS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
1\t7\t4\t100
2\t7\t1\t101
1\t8\t5\t102
"""


@pytest.mark.parametrize("schema, named", [
    ({"label": "stars >= 4", "categorical": ["user_id", "item_id"]}, [r"data\.schema\.label", r"\bstars\b"]),
    ({"label": "rating >= 4", "categorical": ["user_id", "shop_id"]},
     [r"data\.schema\.categorical", r"\bshop_id\b"]),
])
def test_column_that_is_not_in_the_header(schema, named, tmp_path):
    (tmp_path / "ratings.inter").write_text(RATINGS)
    job = base_job(tmp_path, tmp_path / "ratings.inter", data={"format": "recbole", "schema": schema})
    assert_usage_error(hpc_ctr("train", write_job(tmp_path / "job.yaml", job)), tmp_path / "run", *named)


def test_missing_job_file(tmp_path):
    assert_usage_error(hpc_ctr("train", tmp_path / "nothing.yaml"), tmp_path / "run", r"nothing\.yaml")


def test_job_file_that_is_not_yaml(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("merge:\n  k: [3\nrows: {}\n")
    assert_usage_error(hpc_ctr("train", path), tmp_path / "run", r"job\.yaml", r"line \d+")


@pytest.mark.parametrize("override, named", [
    (["--merge.k", "0"], [r"merge\.k\b"]),
    (["--storage.host_budget", "64KiB"], [r"storage\.host_budget"]),
    (["--data.files", "[absent.tsv]"], [r"data\.files", r"absent\.tsv"]),
])
def test_wrong_setting_on_two_ranks_is_said_once(override, named, data, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, data))
    assert_usage_error(hpc_ctr("train", job, *override, ranks=2), tmp_path / "run", *named, ranks=2)


@pytest.mark.parametrize("args, named", [
    (["trian", "job.yaml"], r"\btrain\b"), ([], r"--help"), (["train"], "job")])
def test_wrong_subcommand(args, named):
    done = hpc_ctr(*args)
    assert done.returncode == 2
    assert re.search(named, done.stderr + done.stdout) and "Traceback" not in done.stderr


def test_help_explains_every_option():
    top = ok(hpc_ctr("--help")).stdout
    for subcommand in ("train", "evaluate", "prepare", "doctor"):
        assert re.search(rf"\b{subcommand}\b", top), top
    text = ok(hpc_ctr("train", "--help")).stdout
    for option in ("merge.k", "merge.guard", "rows.replica", "rows.k_rows", "storage.host_budget",
                   "embedding.dim", "train.batches_per_pass", "data.max_bad_share", "--resume"):
        assert option in text, f"{option} is not explained"


def test_small_budget_only_makes_passes_shorter(data, tmp_path):
    """One replica: the same losses, bit for bit, in more passes."""
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, data, train={"batches_per_pass": 10_000}))
    runs = {}
    for name, budget in (("wide", "256MiB"), ("narrow", "2MiB")):
        ok(hpc_ctr("train", job, "--storage.host_budget", budget, "--run_dir", tmp_path / name))
        runs[name] = losses_by_step(tmp_path / name), summary(tmp_path / name)
    assert len(runs["wide"][0]) >= ROWS * 0.8 // 64
    assert runs["narrow"][0] == runs["wide"][0]
    assert runs["narrow"][1]["test_logloss"] == runs["wide"][1]["test_logloss"]
    assert runs["wide"][1]["passes"] == 1 and runs["narrow"][1]["passes"] > 1


def test_a_run_leaves_its_folder(data, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, data, train={"log_every": 5}))
    ok(hpc_ctr("train", job, ranks=2))
    run = tmp_path / "run"
    told = summary(run)
    for key in ("samples", "samples_per_s", "test_auc", "test_logloss", "ranks", "k", "bytes", "tiers",
                "peak_rss_bytes"):
        assert key in told, f"{key} is missing from summary.json"
    assert told["ranks"] == 2 and told["k"] == 5
    assert ROWS * 0.85 < told["samples"] < ROWS * 0.95
    assert 0 <= told["test_auc"] <= 1 and told["test_logloss"] > 0 and math.isfinite(told["samples_per_s"])
    assert (run / "config.yaml").exists() and list((run / "checkpoints").rglob("DONE"))
    steps = losses_by_step(run)
    assert steps and all(math.isfinite(loss) for loss in steps.values())


def test_two_synchronous_ranks_equal_one_with_the_double_batch(data, tmp_path):
    """data.deal: batch, rows world, dense sync: losses and the held-out test to 1e-5."""
    job = write_job(tmp_path / "job.yaml", base_job(
        tmp_path, data, merge={"dense": "sync"}, rows={"replica": "world"},
        data={"deal": "batch", "shuffle": False}))
    ok(hpc_ctr("train", job, "--run_dir", tmp_path / "two", "--data.batch_size", 64, ranks=2))
    ok(hpc_ctr("train", job, "--run_dir", tmp_path / "one", "--data.batch_size", 128, ranks=1))
    two, one = losses_by_step(tmp_path / "two"), losses_by_step(tmp_path / "one")
    assert two.keys() == one.keys() and len(one) >= ROWS * 0.8 // 128
    for step, loss in one.items():
        assert abs(two[step] - loss) <= 1e-5, f"step {step}: {two[step]} and {loss}"
    a, b = summary(tmp_path / "two"), summary(tmp_path / "one")
    assert a["samples"] == b["samples"]
    assert abs(a["test_logloss"] - b["test_logloss"]) <= 1e-5


# ---------------------------------------------------------------- damaged rows


def damage(cells: list[str], how: int) -> list[str]:
    """One row in one of seven ways that no reader may take for a row."""
    cells = list(cells)
    if how == 0:
        return cells[:25]                                   # cut off
    if how == 1:
        return [*cells, "00000001"]                         # a column too many
    if how == 2:
        cells[3] = "abc"                                    # not an integer
    elif how == 3:
        cells[20] = "xyz!"                                  # not hexadecimal
    elif how == 4:
        cells[0] = "click"                                  # not a label
    elif how == 5:
        cells[0] = ""                                       # no label
    elif how == 6:
        cells[30] = "0123456789abcdef0"                     # more than 64 bits
    return cells


DAMAGED = (3, 117, 118, 500, 902, 1333, 1777, 2001, 2640, 2999)         # line numbers from 1


@pytest.fixture(scope="module")
def damaged(data) -> Path:
    """The file with ten bad lines."""
    lines = data.read_text().splitlines()
    for number, line in enumerate(DAMAGED):
        lines[line - 1] = "\t".join(damage(lines[line - 1].split("\t"), number % 7))
    path = data.parent / "damaged.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_ten_damaged_lines_are_reported_and_skipped(ranks, damaged, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, damaged, data={"max_bad_share": 0.05}))
    done = ok(hpc_ctr("train", job, ranks=ranks))
    told = summary(tmp_path / "run")
    text = done.stdout + done.stderr + json.dumps(told)
    found = {int(n) for n in re.findall(r"damaged\.tsv(?:\W+line\W+|:|\W+)(\d+)", text)}
    assert found == set(DAMAGED)
    assert told["bad_rows"] == len(DAMAGED)


def test_too_many_damaged_lines_stop_the_run(damaged, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, damaged, data={"max_bad_share": 0.001}))
    done = hpc_ctr("train", job)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"data\.max_bad_share", done.stderr) and "damaged.tsv" in done.stderr


def test_real_clicks_have_no_bad_rows(tmp_path):
    if not (CRITEO8K / "train.tsv").exists():
        pytest.skip(f"no real click data at {CRITEO8K}; set HPC_CTR_CRITEO8K")
    job = write_job(tmp_path / "job.yaml", base_job(
        tmp_path, CRITEO8K / "train.tsv", model={"name": "deepfm", "hidden": [16]},
        data={"test_files": [str(CRITEO8K / "test.tsv")], "split": {"by": "files"}, "max_bad_share": 0}))
    ok(hpc_ctr("train", job, ranks=2))
    told = summary(tmp_path / "run")
    lines = sum(1 for _ in open(CRITEO8K / "train.tsv", "rb"))
    assert told["samples"] == lines
    assert told["bad_rows"] == 0
    assert 0.5 < told["test_auc"] < 1
