"""The byte trace beside a count of its own: a library before MPI that sees what everybody sends, Horovod too."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import TESTS, base_job, cli_env, command, ok, summary, tiny_parameters, write_criteo, write_job

LINKS = ("same_numa", "same_node", "other_node")


@pytest.fixture(scope="module")
def counter(tmp_path_factory) -> Path:
    """The library, made from mpi_count.c."""
    path = tmp_path_factory.mktemp("counter") / "libmpi_count.so"
    mpicc = Path(sys.executable).with_name("mpicc")
    subprocess.run([str(mpicc) if mpicc.exists() else "mpicc", "-O2", "-shared", "-fPIC", "-o", str(path),
                    str(TESTS / "mpi_count.c")], check=True)
    return path


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "clicks.tsv"
    write_criteo(path, 4000, 300, seed=3)
    return path


def counted(folder: Path, ranks: int) -> tuple[list[Counter], list[Counter]]:
    """Per rank: bytes sent to each rank; bytes handed in to collectives, by call and kind of element."""
    sends, calls = [], []
    for rank in range(ranks):
        send, call = Counter(), Counter()
        for line in (folder / str(rank)).read_text().splitlines():
            name, what, count = line.split()
            if name == "send":
                send[int(what)] += int(count)
            else:
                call[name, what] += int(count)
        sends.append(send)
        calls.append(call)
    return sends, calls


def link_of(sender: int, receiver: int, per_node: int) -> str:
    """Which NUMA domains ranks have is the machine's affair: see ``near``."""
    return "same_node" if sender // per_node == receiver // per_node else "other_node"


def near(links: dict[str, int]) -> Counter:
    """Bytes by link, those within a NUMA domain taken as within the node."""
    out: Counter = Counter()
    for link in LINKS:
        if links.get(link):
            out["same_node" if link == "same_numa" else link] += links[link]
    return out


def run_counted(job: Path, run: Path, counter: Path, counts: Path, ranks: int, *args) -> dict:
    counts.mkdir()
    env = {**cli_env(), "LD_PRELOAD": str(counter), "MPI_COUNT_DIR": str(counts)}
    done = subprocess.run(command("train", job, "--run_dir", run, "--train.trace", "true", *args, ranks=ranks), env=env,
                          capture_output=True, text=True, timeout=240, check=False)
    ok(done)
    return summary(run)


def records(run: Path, rank: int) -> list[dict]:
    lines = (run / "trace" / f"rank-{rank:04d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


MPI_FLAT = ("--merge.backend", "mpi", "--merge.route", "flat")
CASES = {
    "two nodes": (2, 1, MPI_FLAT),
    "nodes of two and one": (3, 2, ("--merge.route", "nodes")),
    "two nodes of two": (4, 2, ("--merge.route", "nodes", "--merge.overlap", "true")),
    "nodes that are workers": (4, 2, ("--merge.dense_workers", "node")),
    "replicas are nodes": (4, 2, (*MPI_FLAT, "--rows.replica", "node", "--rows.window", "x")),
    "gradients": (3, 1, (*MPI_FLAT, "--merge.dense", "sync", "--rows.replica", "rank")),
}


@pytest.mark.parametrize("case", CASES)
def test_every_message_is_in_the_trace(case, counter, clicks, tmp_path):
    ranks, per_node, more = CASES[case]
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks))
    before = time.time()
    told = run_counted(job, tmp_path / "run", counter, tmp_path / "counts", ranks,
                       "--cluster.ranks_per_node", per_node, *more)
    after = time.time()
    sends, calls = counted(tmp_path / "counts", ranks)

    everywhere: Counter = Counter()
    estimated = 0
    for rank in range(ranks):
        wanted: Counter = Counter()
        for peer, count in sends[rank].items():
            wanted[link_of(rank, peer, per_node)] += count
        got: Counter = Counter()
        for record in records(tmp_path / "run", rank):
            assert set(record) == {"operation", "purpose", "begin", "end", "bytes"}
            assert before - 1 <= record["begin"] <= record["end"] <= after + 1
            if record["operation"] == "allreduce":      # the library's own, of which the trace has an estimate
                estimated += sum(record["bytes"].values())
            else:
                got.update(near(record["bytes"]))
        assert got == wanted, f"rank {rank}: in the trace {dict(got)}, sent {dict(wanted)}"
        everywhere += wanted
    in_summary: Counter = Counter()
    for purpose, links in told["bytes"].items():
        if purpose != "metrics":
            in_summary.update(near(links))
    assert estimated == sum(near(told["bytes"]["metrics"]).values())
    for call in calls:
        assert estimated == 2 * (ranks - 1) * (call["allreduce", "floats"] + call["allreduce", "others"])
    assert in_summary == everywhere and sum(everywhere.values()) > 100_000
    assert everywhere["other_node"] > 0 or per_node == ranks


@pytest.mark.parametrize("ranks, dense", [(2, "sync"), (3, "kstep")])
def test_what_horovod_sums_is_in_the_trace(ranks, dense, counter, clicks, tmp_path):
    """Handed in: exactly. Sent by the library: an estimate of 2(N-1)S over all ranks."""
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks))
    run = tmp_path / "run"
    told = run_counted(job, run, counter, tmp_path / "counts", ranks, "--merge.backend", "horovod",
                       "--merge.dense", dense)
    sends, calls = counted(tmp_path / "counts", ranks)
    merged = {purpose: told["bytes"].get(purpose, {}) for purpose in ("dense_merge", "dense_grad")}
    payload = sum(links.get("payload", 0) for links in merged.values())
    size = tiny_parameters() * 4
    assert payload == size * (told["steps"] if dense == "sync" else 2 * told["merges"]) > 0
    for rank in range(ranks):
        assert calls[rank]["allreduce", "floats"] == payload
    links = Counter()
    for each in merged.values():
        links.update(near(each))
    assert links == {"same_node": 2 * (ranks - 1) * payload}

    # all else goes by this package's own messages
    lines = [record for rank in range(ranks) for record in records(run, rank)]
    others = sum(sum(record["bytes"].values()) for record in lines if record["operation"] != "allreduce")
    assert others == sum(sum(send.values()) for send in sends)


def test_calls_and_seconds_are_in_the_summary_and_survive_a_resume(clicks, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, checkpoint={"every_passes": 1}))
    run = tmp_path / "run"
    env = cli_env()
    for steps in (20, 40):
        args = command("train", job, "--run_dir", run, "--train.trace", "true", "--resume", "auto", "--train.max_steps",
                       steps, ranks=2)
        ok(subprocess.run(args, env=env, capture_output=True, text=True, timeout=240, check=False))
    told = summary(run)
    lines = [record for rank in range(2) for record in records(run, rank)]
    by_purpose = Counter(record["purpose"] for record in lines)
    calls = {purpose: each["calls"] for purpose, each in told["exchanges"].items()}
    # what the first half did after its last checkpoint is not part of the run that goes on from there
    training = {purpose: count for purpose, count in calls.items() if purpose not in ("lookup", "eval", "metrics")}
    assert training == {purpose: by_purpose[purpose] for purpose in training} and len(training) >= 4
    assert all(0 < each["seconds"] < 60 for each in told["exchanges"].values())


def test_without_it_no_file_is_written(clicks, tmp_path):
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks))
    run = tmp_path / "run"
    ok(subprocess.run(command("train", job, "--run_dir", run, "--train.max_steps", 5, ranks=2), env=cli_env(),
                      capture_output=True, text=True, timeout=240, check=False))
    assert not os.path.exists(run / "trace")
    assert summary(run)["exchanges"]["dense_merge"]["calls"] > 0
