"""What surrounds training: signals, run folders, precision, losses that are not finite, several tables."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import (
    base_job,
    cli_env,
    command,
    complete_checkpoints,
    hpc_ctr,
    losses_by_step,
    ok,
    summary,
    write_criteo,
    write_job,
)

from hpc_ctr.cli.main import _run as run_command
from hpc_ctr.errors import DataError, UsageError
from hpc_ctr.report.run_folder import FolderLock


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "clicks.tsv"
    write_criteo(path, 3000, 50, seed=3)
    return path


def wait_for(condition, process: subprocess.Popen, seconds: float = 90) -> None:
    """Until the condition holds; fails when the process ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize("ranks, number", [(1, signal.SIGUSR1), (2, signal.SIGTERM)])
def test_a_signal_to_one_rank_saves_all_and_asks_to_be_requeued(ranks, number, clicks, tmp_path):
    """Exit code 75, and the resumed run has the losses of one that was left alone, bit for bit."""
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, data={"batch_size": 8, "epochs": 3},
                                                    checkpoint={"every_passes": 0}))
    ok(hpc_ctr("train", job, "--run_dir", tmp_path / "alone", ranks=ranks))
    pids = tmp_path / "pids"
    pids.mkdir()
    line = command("train", job, ranks=ranks, pid_dir=pids)
    process = subprocess.Popen(line, env=cli_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: losses_by_step(tmp_path / "run"), process)
    os.kill(int((pids / str(ranks - 1)).read_text()), number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
    assert "--resume auto" in told and len(complete_checkpoints(tmp_path / "run")) == 1
    before = losses_by_step(tmp_path / "run")
    ok(hpc_ctr("train", job, "--resume", "auto", ranks=ranks))
    alone = losses_by_step(tmp_path / "alone")
    assert 0 < len(before) < len(alone)
    assert losses_by_step(tmp_path / "run") == alone
    assert summary(tmp_path / "run")["test_auc"] == summary(tmp_path / "alone")["test_auc"]


def test_a_loss_that_is_not_finite_stops_all_ranks(clicks, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, model={"name": "dnn", "hidden": [8, 8]},
                                                    dense={"lr": 1e30}))
    done = hpc_ctr("train", job, ranks=2)
    assert done.returncode == 1
    assert "not finite at step" in done.stderr and "dense.lr" in done.stderr
    assert done.stderr.count("hpc-ctr: error:") == 1 and "Traceback" not in done.stderr


def test_a_run_folder_is_not_overwritten_unasked(clicks, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, train={"max_steps": 3}))
    ok(hpc_ctr("train", job))
    first = losses_by_step(tmp_path / "run")
    again = hpc_ctr("train", job)
    assert again.returncode == 2 and "run_dir" in again.stderr and "--overwrite" in again.stderr
    finished = hpc_ctr("train", job, "--resume", "auto")
    assert finished.returncode == 0 and "finished" in finished.stderr
    assert losses_by_step(tmp_path / "run") == first
    longer = hpc_ctr("train", job, "--resume", "auto", "--train.max_steps", "6")
    assert len(losses_by_step(tmp_path / "run")) == 6, longer.stderr
    (tmp_path / "run" / "summary.json").unlink()  # killed between the last checkpoint and the summary
    ok(hpc_ctr("train", job, "--resume", "auto", "--train.max_steps", "6"))
    assert 0 < summary(tmp_path / "run")["test_auc"] < 1 and summary(tmp_path / "run")["steps"] == 6
    merged = summary(tmp_path / "run")
    assert merged["bytes"]["dense_merge"]["payload"] == 2 * merged["merged_bytes"] * merged["merges"]
    ok(hpc_ctr("train", job, "--overwrite", "true", "--seed", "8"))
    assert losses_by_step(tmp_path / "run") != first
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("years of work")
    refused = hpc_ctr("train", job, "--run_dir", stranger, "--overwrite", "true")
    assert refused.returncode == 2 and (stranger / "thesis.txt").exists()


def here(*args) -> int:
    """The command on one rank, inside this process: quicker, and its errors come out as they are."""
    return run_command([str(arg) for arg in args])


def refused(*args) -> str:
    """The sentence with which the command refuses."""
    with pytest.raises(UsageError) as error:
        here(*args)
    return str(error.value)


def test_a_start_that_fails_leaves_the_earlier_run_alone(clicks, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, train={"max_steps": 3}))
    wrong = ("--model.name", "dnn", "--model.hidden", "many")
    for _ in range(2):  # the second time the folder of the first is no run that would have to be overwritten
        assert "model.hidden" in refused("train", job, *wrong)
    assert here("train", job, "--seed", 2**63 - 1) == 0
    before = {each: each.read_bytes() for each in (tmp_path / "run").iterdir() if each.is_file()}
    assert {each.name for each in before} == {"config.yaml", "metrics.jsonl", "summary.json"}
    longer = ("--resume", "auto", "--train.max_steps", "6", "--seed", 2**63 - 1)
    assert "model.hidden" in refused("train", job, "--overwrite", "true", *wrong)
    assert "embedding" in refused("train", job, *longer, "--embedding.dim", "8")
    assert "data" in refused("train", job, *longer, "--data.shuffle", "false")
    assert {each: each.read_bytes() for each in before} == before


def test_two_runs_do_not_share_a_folder(clicks, tmp_path):
    """Neither the run folder of one that has not ended, nor the checkpoints of another."""
    shared = tmp_path / "shared"
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, train={"max_steps": 3},
                                                    checkpoint={"dir": str(shared), "every_passes": 1}))
    for taken in (tmp_path / "run", shared):
        lock = FolderLock(taken, "")
        for how in (("--overwrite", "true"), ("--resume", "auto")):
            assert f"has not ended writes into {taken}" in refused("train", job, *how)
        lock.close()
    assert here("train", job) == 0
    assert "checkpoint.dir" in refused("train", job, "--run_dir", tmp_path / "other", "--overwrite", "true")
    elsewhere = ("--resume", shared, "--checkpoint.dir", tmp_path / "new")
    (tmp_path / "other" / "config.yaml").write_text("")
    assert "already holds a run" in refused("train", job, *elsewhere, "--run_dir", tmp_path / "other")
    assert [each.parent.name for each in shared.rglob("DONE")] == ["step-000000003"]
    assert here("train", job, "--overwrite", "true", "--train.max_steps", "2") == 0
    assert [each.parent.name for each in shared.rglob("DONE")] == ["step-000000002"]


def test_nothing_to_train_or_to_test_on_is_said(clicks, tmp_path, capsys):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, storage={"dir": str(tmp_path / "ssd" / "deep")}))
    with pytest.raises(DataError, match="no row to train on: 3,000 rows"):
        here("train", job, "--data.split.test", "0.9999999")
    few = ("--train.max_steps", "2", "--overwrite", "true", "--data.split.test", "1e-7")
    assert here("train", job, *few) == 0
    told = capsys.readouterr().err
    assert "no test metrics" in told and "nan" not in told.splitlines()[-1]
    shutil.rmtree(tmp_path / "ssd")  # another machine has none of it
    with pytest.raises(DataError, match="nothing to evaluate"):
        here("evaluate", tmp_path / "run")


def test_bfloat16_autocast_trains_about_as_well(clicks, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, model={"name": "accept_common:TinyWideNet"},
                                                      data={"epochs": 2}))
    for precision in ("float32", "bfloat16"):
        ok(hpc_ctr("train", job, "--precision", precision, "--run_dir", tmp_path / precision))
    exact, rough = (losses_by_step(tmp_path / p) for p in ("float32", "bfloat16"))
    assert exact != rough
    assert abs(summary(tmp_path / "float32")["test_logloss"] - summary(tmp_path / "bfloat16")["test_logloss"]) < 0.01


def test_several_tables_on_two_ranks(clicks, tmp_path):
    tables = [{"name": "wide", "fields": ["C3", "C1"], "dim": 6, "optimizer": "rowwise_adagrad", "lr": 0.05}]
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, model={"name": "dnn", "hidden": [8]},
                                                    embedding={"tables": tables}))
    ok(hpc_ctr("train", job, ranks=2))
    one = hpc_ctr("evaluate", tmp_path / "run")
    three = hpc_ctr("evaluate", tmp_path / "run", ranks=3)
    assert '"auc"' in ok(one).stdout
    assert [x for x in one.stdout.splitlines() if "auc" in x] == [x for x in ok(three).stdout.splitlines() if "auc" in x]
