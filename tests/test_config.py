"""The job file itself: YAML that would be read as something else than was meant, and values that no job can have."""

import os

import pytest

from hpc_ctr import config
from hpc_ctr.cli.main import parse_overrides
from hpc_ctr.errors import UsageError
from hpc_ctr.units import parse_bytes

DATA = "data: {files: [a]}\n"


@pytest.mark.parametrize("text, message", [
    (DATA + "model: {name: lr}\nmodel: {name: dnn}\n", "line 3: not valid YAML .model stands there twice"),
    ("data: {files: [a], files: [b]}\n", "line 1: .*files stands there twice"),
    ("data: &d\n  files: *d\n", r"line 2: .*\*d stands inside of what it stands for"),
    ("run_dir: \0", "not valid YAML"),
    (DATA + 'run_dir: "a\\0b"\n', "run_dir: .*null character"),
    (DATA + "run_dir: ''\n", "run_dir: no folder is named"),
    (DATA + f"seed: {10**30}\n", "seed: 10+ is too large"),
    (DATA + f"train: {{threads: -{10**30}}}\n", "train.threads: -10+ is too large"),
    (DATA + "train: {threads: 100000}\n", "train.threads: must be at most 1024"),
    (DATA + f"storage: {{host_budget: {10**30}}}\n", "storage.host_budget: 10+ is too large"),
])
def test_a_job_file_that_cannot_be_meant(text, message, tmp_path):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        config.load(tmp_path / "job.yaml")
    assert "\n" not in str(error.value)


def test_anchors_and_merged_mappings_are_fine(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "data: {files: [a]}\nmerge: &k {k: 3}\nrows: {k_rows: 4}\ndense: &d {lr: 1e-2}\nembedding: {<<: *d, lr: 0.5}\n")
    job = config.load(tmp_path / "job.yaml")
    assert (job.merge.k, job.dense.lr, job.embedding.lr) == (3, 0.01, 0.5)


def test_folders_below_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    job = config.from_dict({"data": {"files": ["a"]}, "run_dir": "~/run", "checkpoint": {"dir": "~/kept"}})
    assert (job.run_dir, job.checkpoint.dir) == (os.path.join(tmp_path, "run"), os.path.join(tmp_path, "kept"))


@pytest.mark.parametrize("word", ["--.k", "--data.", "--data..files", "--."])
def test_an_override_without_a_name(word):
    with pytest.raises(UsageError, match="is not the name of a setting"):
        parse_overrides([word, "3"])


def test_a_size_that_no_machine_has():
    with pytest.raises(UsageError, match="x: '99999999TiB' is more than any machine has"):
        parse_bytes("99999999TiB", "x")
