"""Click files, job files and the command line as a user meets it, for the acceptance tests."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

TESTS = Path(__file__).resolve().parent
REPO = TESTS.parent


# ---------------------------------------------------------------- files


def write_criteo(path: Path, rows: int, vocabulary: int, seed: int, zipf: float | None = 1.2,
                 missing: float = 0.05) -> int:
    """A Criteo-format TSV (label, 13 integers, 26 hex ids) of ``rows`` lines; ids are uniform where zipf
    is None.

    Returns the number of distinct (field, id) pairs, a field's missing value counted as one.
    """
    rng = np.random.default_rng(seed)
    ints = np.floor(rng.lognormal(1, 1.5, (rows, 13))).astype(np.int64) - 2
    if zipf is None:
        ids = rng.integers(0, vocabulary, (rows, 26))
    else:
        ids = np.minimum(rng.zipf(zipf, (rows, 26)) - 1, vocabulary - 1)
    score = np.sin(ids[:, :8] * 1.3 + np.arange(8)).sum(1) + 0.3 * np.log1p(np.maximum(ints[:, 0], 0)) - 1.5
    label = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(int)
    holes = rng.random((rows, 39)) < missing
    # spread over all 32 bits: real ids are hashes, and half of them do not fit a signed integer
    hexed = (ids * 2654435761 + np.arange(26)) % (1 << 32)
    with open(path, "w") as out:
        for i in range(rows):
            cells = [str(label[i])]
            cells += ["" if holes[i, j] else str(ints[i, j]) for j in range(13)]
            cells += ["" if holes[i, 13 + j] else f"{hexed[i, j]:08x}" for j in range(26)]
            out.write("\t".join(cells) + "\n")
    kept = np.where(holes[:, 13:], np.int64(-1), ids)
    return int(sum(len(np.unique(kept[:, j])) for j in range(26)))


# ---------------------------------------------------------------- the command line


def base_job(folder: Path, clicks: Path, **sections) -> dict:
    """A job on one Criteo-format file, small and quick; ``sections`` are merged in, one level deep."""
    job = {
        "seed": 7,
        "run_dir": str(folder / "run"),
        "device": "cpu",
        "data": {"format": "criteo", "files": [str(clicks)], "split": {"by": "hash", "test": 0.1},
                 "batch_size": 64, "epochs": 1, "shuffle": True, "shuffle_blocks": 2, "block_bytes": 65536},
        "model": {"name": "accept_common:TinyWideNet", "hidden": 8},
        "embedding": {"dim": 4, "optimizer": "adam", "lr": 0.01},
        "dense": {"lr": 0.003},
        "merge": {"dense": "kstep", "k": 5, "backend": "auto"},
        "rows": {"replica": "world", "k_rows": 5},
        "train": {"batches_per_pass": 10, "log_every": 1},
        "checkpoint": {"every_passes": 2},
        "storage": {"host_budget": "256MiB"},
    }
    for name, values in sections.items():
        if isinstance(values, dict) and isinstance(job.get(name), dict):
            job[name] = {**job[name], **values}
        else:
            job[name] = values
    return job


def tiny_parameters(num_dense: int = 13, fields: int = 26, dim: int = 4, hidden: int = 8) -> int:
    """Number of dense parameters of TinyNet; by default of the one in ``base_job``."""
    return (num_dense + fields * dim) * hidden + hidden + hidden + 1


def write_job(path: Path, job: dict) -> Path:
    """Write the job file and return its path."""
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def cli_env() -> dict[str, str]:
    """Environment of a command started from inside a test: that of a fresh shell, not of a rank of this
    process.
    """
    inherited = ("OMPI_COMM_", "OMPI_APP", "OMPI_FIRST", "OMPI_NUM", "OMPI_WORLD", "OMPI_UNIVERSE", "PMIX_",
                 "PMI_", "PRTE_", "_PYTEST_MPI")
    env = {k: v for k, v in os.environ.items() if not k.startswith(inherited) or k.startswith("PRTE_MCA_")}
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
               PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe", OMPI_MCA_mpi_yield_when_idle="1",
               OMP_NUM_THREADS="1",
               OMP_WAIT_POLICY="passive", COLUMNS="200", TERM="dumb")
    paths = [str(REPO), str(TESTS), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
    return env


def mpirun() -> str:
    """Path of mpirun beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else (shutil.which("mpirun") or "mpirun")


def command(*args, ranks: int = 1, pid_dir: Path | None = None) -> list[str]:
    """Command line of ``hpc-ctr args``; with pid_dir every rank leaves its process id in ``pid_dir/rank``."""
    program = [sys.executable, "-m", "hpc_ctr.cli.main", *map(str, args)]
    if pid_dir is not None:
        note = 'echo $$ > "$0/${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}"; exec "$@"'
        program = ["/bin/sh", "-c", note, str(pid_dir), *program]
    return [mpirun(), "-n", str(ranks), *program] if ranks > 1 else program


def hpc_ctr(*args, ranks: int = 1, timeout: float = 240) -> subprocess.CompletedProcess:
    """Run ``hpc-ctr args`` to its end, output captured as text."""
    return subprocess.run(command(*args, ranks=ranks), env=cli_env(), capture_output=True, text=True,
                          timeout=timeout, check=False)


def ok(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Fail with the command's whole output unless it ended 0."""
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done


def losses_by_step(run_dir: Path) -> dict[int, float]:
    """step -> loss of ``metrics.jsonl``; of a step that is there twice the later."""
    out = {}
    if not (run_dir / "metrics.jsonl").exists():
        return out
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:                # the line that a kill cut
            continue
        if row.get("kind") == "train":
            out[int(row["step"])] = row["loss"]
    return out


def summary(run_dir: Path) -> dict:
    """``summary.json`` of a run."""
    return json.loads((run_dir / "summary.json").read_text())


def total_named(tree, name: str) -> float:
    """Sum of all numbers in the nested ``tree`` whose path has a part that matches the pattern ``name``."""
    if not isinstance(tree, dict):
        return 0
    found = 0
    for key, value in tree.items():
        if re.search(name, str(key)):
            found += _total(value)
        else:
            found += total_named(value, name)
    return found


def _total(tree) -> float:
    if isinstance(tree, dict):
        return sum(_total(v) for v in tree.values())
    return tree if isinstance(tree, (int, float)) and not isinstance(tree, bool) else 0


@dataclass
class Killed:
    """What a run with a killed rank left: exit code, output, seconds from the kill to the job's end."""

    returncode: int
    output: str
    seconds: float
    last_step: int


def complete_checkpoints(run_dir: Path) -> set[Path]:
    """Folders of complete checkpoints."""
    return {done.parent for done in (run_dir / "checkpoints").rglob("DONE")}


def run_and_kill(job: Path, run_dir: Path, scratch: Path, *args, ranks: int = 2, victim: int = 1,
                 limit: float = 120, more: int = 3) -> Killed:
    """Start the job under mpirun and SIGKILL one rank once a new checkpoint is complete and ``more`` steps are
    logged after it; wait for the job's end.

    Fails when the job ends before that, or is still there ``limit`` seconds after its start or a minute
    after the
    kill.
    """
    pids = scratch / f"pids-{time.monotonic_ns()}"
    pids.mkdir(parents=True)
    before = complete_checkpoints(run_dir)
    output = scratch / f"{pids.name}.log"

    def said() -> str:
        return output.read_text(errors="replace")[-10_000:]

    with open(output, "wb") as log:
        process = subprocess.Popen(command("train", job, *args, ranks=ranks, pid_dir=pids), env=cli_env(),
                                   stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + limit
        seen_at = None
        while True:
            assert process.poll() is None, f"the job ended before it could be killed:\n{said()}"
            assert time.monotonic() < deadline, f"no new checkpoint within {limit} s:\n{said()}"
            if complete_checkpoints(run_dir) - before:
                step = max(losses_by_step(run_dir), default=0)
                seen_at = step if seen_at is None else seen_at
                if step >= seen_at + more:
                    break
            time.sleep(0.02)
        os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)
        killed = time.monotonic()
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running a minute after the kill:\n{said()}") from None
        return Killed(code, said(), time.monotonic() - killed,
                      max(losses_by_step(run_dir), default=0))
    finally:
        if process.poll() is None:
            process.terminate()                     # mpirun then ends its ranks
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
