"""Interruption, resumption and the tiers change no bit of the loss series; the merge moves exactly 2S
bytes.
"""

import json
import math
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import (
    base_job,
    complete_checkpoints,
    hpc_ctr,
    losses_by_step,
    ok,
    run_and_kill,
    summary,
    tiny_parameters,
    total_named,
    write_criteo,
    write_job,
)

EPOCHS, BATCH, RANKS = 2, 32, 2
PASS, K = 20, 7                             # checkpoints at 40, 80, ... steps fall inside windows of 7
DENSE_MERGE = r"dense.?merge|merge.?dense"


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    """Enough rows for some 300 steps on two ranks, so that two kills fall well inside."""
    path = tmp_path_factory.mktemp("clicks") / "clicks.tsv"
    write_criteo(path, 10_500, 400, seed=2)
    return path


def job_of(folder: Path, clicks: Path, replica: str, dense: str) -> Path:
    """Two epochs, a checkpoint every second pass, windows that do not fit the passes."""
    return write_job(folder / "job.yaml", base_job(
        folder, clicks, data={"batch_size": BATCH, "epochs": EPOCHS}, merge={"dense": dense, "k": K},
        rows={"replica": replica, "k_rows": 5}, train={"batches_per_pass": PASS, "log_every": 1},
        checkpoint={"every_passes": 2}))


def exact(losses: dict[int, float]) -> dict[int, str]:
    """Losses such that equal bits, and only those, compare equal (NaN too)."""
    return {step: "nan" if loss is None or math.isnan(loss) else float(loss).hex()
            for step, loss in losses.items()}


def first_difference(got: dict, want: dict) -> str:
    """Where two loss series part, in words; empty when they are the same."""
    got, want = exact(got), exact(want)
    for step in sorted(got.keys() | want.keys()):
        if got.get(step) != want.get(step):
            return f"step {step}: {got.get(step)} instead of {want.get(step)}"
    return ""


def assert_clear_end(killed, rank: int) -> None:
    """A job that lost a rank ended non-zero in time and says which rank, or that it was killed."""
    assert killed.returncode != 0, killed.output[-3000:]
    assert killed.seconds < 60
    for told in (rf"rank\W*{rank}\b", r"(?i)signal 9|killed|lost"):
        assert re.search(told, killed.output), killed.output[-3000:]


# every rank a node of its own, merges of the dense part beside the next step, of x alone between ends of passes
BY_NODES = ("--cluster.ranks_per_node", 1, "--merge.dense_workers", "node", "--merge.overlap", "true",
            "--rows.window", "x")


@pytest.mark.kills
@pytest.mark.parametrize("replica, dense, victims, more", [
    ("rank", "kstep", (1, 0), ()), ("world", "sync", (1,), ()), ("node", "kstep", (1,), BY_NODES)])
def test_killed_and_resumed_has_the_same_losses(replica, dense, victims, more, clicks, tmp_path):
    job = job_of(tmp_path, clicks, replica, dense)
    whole_dir, cut_dir = tmp_path / "whole", tmp_path / "cut"
    ok(hpc_ctr("train", job, "--run_dir", whole_dir, *more, ranks=RANKS))
    whole = losses_by_step(whole_dir)
    assert len(whole) > 250 and sorted(whole) == list(range(1, len(whole) + 1))

    for turn, victim in enumerate(victims):         # the second time the rank that writes metrics.jsonl
        args = ["--run_dir", cut_dir, *more]
        if turn or dense == "sync":                 # auto without a checkpoint: just start
            args += ["--resume", "auto"]
        killed = run_and_kill(job, cut_dir, tmp_path, *args, ranks=RANKS, victim=victim)
        assert_clear_end(killed, victim)
        assert not (cut_dir / "summary.json").exists() or summary(cut_dir).get("status") != "done"
        assert killed.last_step < len(whole)
        if turn:
            assert "continuing from" in killed.output, killed.output[-3000:]

    kept = complete_checkpoints(cut_dir)
    assert kept
    done = ok(hpc_ctr("train", job, "--run_dir", cut_dir, *more, "--resume", "auto", ranks=RANKS))
    assert "continuing from" in done.stdout + done.stderr
    assert first_difference(losses_by_step(cut_dir), whole) == ""
    a, b = summary(cut_dir), summary(whole_dir)
    for key in ("test_auc", "test_logloss"):
        assert a[key] == b[key], f"{key}: {a[key]} resumed, {b[key]} undisturbed"

    # the undisturbed run also shows what moved
    size = tiny_parameters() * 4
    moved = total_named(b["bytes"].get("dense_merge", {}), "payload")
    if dense == "kstep":
        merges = math.ceil(len(whole) / K)                  # the last one at the very end
        expected = 2 * size * merges
        assert moved == expected, f"{moved} bytes, expected {expected}: {size} x {merges}"
        links = total_named(b["bytes"], DENSE_MERGE) - moved
        # a ring over the ranks; by nodes, from each of the two nodes to the other
        assert links == (2 * expected if more else 2 * (RANKS - 1) * expected)
    else:
        assert moved == 0


def test_dense_merge_bytes_are_twice_the_parameters_a_merge(clicks, tmp_path):
    """k = 1, whose last merge is no extra one."""
    job = job_of(tmp_path, clicks, "world", "kstep")
    run = tmp_path / "run"
    ok(hpc_ctr("train", job, "--run_dir", run, "--merge.k", 1, "--train.max_steps", 50, ranks=RANKS))
    assert max(losses_by_step(run)) == 50
    assert summary(run)["bytes"]["dense_merge"]["payload"] == 2 * 4 * tiny_parameters() * 50


def test_nodes_as_workers_go_on_with_another_arrangement(clicks, tmp_path):
    """Four ranks of two nodes, a merge of the dense part under way at the checkpoint; then three ranks, then one."""
    job = job_of(tmp_path, clicks, "auto", "kstep")
    args = ["train", job, "--run_dir", tmp_path / "run", *BY_NODES, "--merge.k", PASS, "--resume", "auto"]
    for steps, ranks, per_node in ((40, 4, 2), (60, 3, 2), (80, 1, 1)):
        done = ok(hpc_ctr(*args, "--train.max_steps", steps, "--cluster.ranks_per_node", per_node, ranks=ranks))
        assert ("continuing from" in done.stdout + done.stderr) == (steps > 40)
        losses = losses_by_step(tmp_path / "run")
        assert sorted(losses) == list(range(1, steps + 1)) and all(math.isfinite(loss) for loss in losses.values())
        told = summary(tmp_path / "run")["bytes"]
        if ranks == 4:
            far = total_named(told, "other_node")
            assert far > 0, json.dumps(told)


def test_resumed_after_its_end_a_run_stays_as_it_is(clicks, tmp_path):
    """--resume auto on a finished run says so, trains nothing more and keeps its results."""
    job = job_of(tmp_path, clicks, "world", "kstep")
    run = ["train", job, "--run_dir", tmp_path / "run", "--train.max_steps", 60]
    ok(hpc_ctr(*run))
    before, told = losses_by_step(tmp_path / "run"), summary(tmp_path / "run")
    again = hpc_ctr(*run, "--resume", "auto")
    assert again.returncode == 0 and "finished" in again.stderr and "Traceback" not in again.stderr
    assert first_difference(losses_by_step(tmp_path / "run"), before) == ""
    assert summary(tmp_path / "run")["test_logloss"] == told["test_logloss"]


def test_one_replica_tiers_and_pass_length_are_invisible(tmp_path):
    """The whole table in memory, a tenth of it, and another pass length: the same bits."""
    clicks = tmp_path / "clicks.tsv"
    distinct = write_criteo(clicks, 20_000, 20_000, seed=3, zipf=None)
    dim = 16
    record = 3 * (dim + 1) * 4                              # x, m and v of vector and first-order weight
    job = write_job(tmp_path / "job.yaml", base_job(
        tmp_path, clicks, data={"block_bytes": 1 << 20}, embedding={"dim": dim},
        train={"batches_per_pass": 10}))
    tenth = int(distinct * record * 0.9) // 10              # a tenth of the rows are only in the test part
    runs = {}
    for name, args in {"memory": [], "tenth": ["--storage.host_budget", tenth],
                       "passes": ["--train.batches_per_pass", 3]}.items():
        ok(hpc_ctr("train", job, "--run_dir", tmp_path / name, *args))
        runs[name] = losses_by_step(tmp_path / name), summary(tmp_path / name)
    losses, told = runs["memory"]
    assert len(losses) >= 20_000 * 0.85 // 64
    for name in ("tenth", "passes"):
        assert first_difference(runs[name][0], losses) == "", name
        for key in ("test_logloss", "test_auc"):
            assert runs[name][1][key] == told[key], (name, key)
    assert total_named(told["tiers"], "cold_hits") == 0, json.dumps(told["tiers"])
    tiers = runs["tenth"][1]["tiers"]
    for counter in ("cold_hits", "rows_evicted"):
        assert total_named(tiers, counter) > 1000, json.dumps(tiers)
