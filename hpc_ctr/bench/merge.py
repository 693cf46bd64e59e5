"""``hpc-ctr bench merge``: two ranks on two hosts with a slow network between them, merging seldom or in every step."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_ctr.bench.common import MPI_ENVIRONMENT, Results, Targets
from hpc_ctr.bench.plot import write_svg
from hpc_ctr.bench.two_hosts import TwoHosts, missing
from hpc_ctr.data.synthetic import SyntheticOptions, write_synthetic
from hpc_ctr.errors import UsageError
from hpc_ctr.report.run_folder import read_summary, write_json

RATES = {"100mbit": 100.0, "1gbit": 1000.0}
MODELS = ("dnn", "dlrm")
CASES = [f"{model}_{rate}" for rate in RATES for model in MODELS]
KS = (1, 5, 20, 50)
SYSTEMS = ["sync", *(f"k{k}" for k in KS), "never", "ddp", "semisync"]
WIDTH = 16  # floats of an embedding
_PEERS = ("ddp", "semisync")


@dataclass(frozen=True)
class MergeBench:
    """What to measure. ids: rows of the table; steps: timed in a run, after ``warm`` that are not; both are a multiple of
    pass_steps, the steps of a pass; batch: samples a rank and step; rounds: runs of each kind, in turns; delay_us: of the
    link, one way; plot: an SVG file a case, with the case's name before its suffix ("" = none).
    """

    ids: int = 5_000_000
    zipf: float = 1.1
    steps: int = 100
    warm: int = 100
    pass_steps: int = 100
    batch: int = 2048
    rounds: int = 3
    delay_us: float = 50
    dir: Path = Path("runs/bench-merge")
    cases: list[str] = field(default_factory=lambda: list(CASES))
    systems: list[str] = field(default_factory=lambda: list(SYSTEMS))
    plot: str = ""

    def check(self) -> None:
        """Raises UsageError naming the option."""
        for name in ("ids", "steps", "pass_steps", "batch", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')}: must be at least 1, not {getattr(self, name)}")
        if self.steps % self.pass_steps or self.warm % self.pass_steps or self.warm < 0:
            raise UsageError(f"--steps, --warm: {self.steps} and {self.warm} must be multiples of --pass-steps "
                             f"{self.pass_steps}: passes are what is timed")
        for option, given, known in (("cases", self.cases, CASES), ("systems", self.systems, SYSTEMS)):
            if wrong := [name for name in given if name not in known]:
                raise UsageError(f"--{option}: {wrong[0]!r} is not one of {', '.join(known)}")


@dataclass(frozen=True)
class Run:
    """What a run reported. samples_per_s: over the timed steps, of both ranks. For all steps, and None where a system
    does not tell: link: payload bytes a step on the network by the interfaces' counters; traced: between the hosts by the
    trace; dense_bytes, dense_seconds: a step, of the exchanges of the dense part."""

    samples_per_s: float
    link: float | None = None
    traced: float | None = None
    dense_bytes: float | None = None
    dense_seconds: float | None = None


def bench_merge(results: Results, options: MergeBench) -> Targets:
    """Measure, print, plot, and return what is aimed at beside what came out. Raises UsageError."""
    options.check()
    if reason := missing():
        raise UsageError(f"bench merge needs two hosts and cannot make them on this machine: {reason}")
    targets = Targets()
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="merge-", dir=options.dir)).resolve()
    try:
        write_synthetic(SyntheticOptions(rows=2 * options.batch * (options.warm + options.steps), test_rows=0,
                                         ids=options.ids, zipf=options.zipf, model="linear", latent=1), folder)
        for case in options.cases:
            _case(results, targets, options, case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return targets


def _case(results: Results, targets: Targets, options: MergeBench, case: str, folder: Path) -> None:
    model, _, rate = case.partition("_")
    runs: dict[str, list[Run]] = {}
    for number in range(options.rounds):
        for system in options.systems[::1 if number % 2 == 0 else -1]:
            with TwoHosts(RATES[rate], options.delay_us) as hosts:
                try:
                    run = _kind(system)(hosts, options, model, system, folder)
                except ModuleNotFoundError as error:
                    run = None
                    print(f"{case}: {system} is not measured: {error}", flush=True)
            if run:
                runs.setdefault(system, []).append(run)
    for system in options.systems:
        if system in runs:
            results.add(case, system, "samples/s", [run.samples_per_s for run in runs[system]])
    for name, unit in (("link", "bytes/step"), ("traced", "bytes/step"), ("dense_bytes", "bytes/step"),
                       ("dense_seconds", "s/step")):
        for system, done in runs.items():
            if getattr(done[0], name) is not None:
                results.add(f"{case}_{name}", system, unit, [getattr(run, name) for run in done])
    _aim(targets, case, runs)
    if options.plot:
        path = Path(options.plot)
        _plot(path.with_name(f"{path.stem}-{case}{path.suffix}"), case, runs)


def _aim(targets: Targets, case: str, runs: dict[str, list[Run]]) -> None:
    for system, done in runs.items():
        if done[0].traced:
            ratio = statistics.median(run.link / run.traced for run in done)
            targets.value(f"{case}: {system}, link / trace, off 1 by", abs(ratio - 1), 0.05, most=True)
    if "sync" in runs and "k20" in runs:
        for name in ("dense_bytes", "dense_seconds"):
            k20, sync = (statistics.median(getattr(run, name) for run in runs[system]) for system in ("k20", "sync"))
            targets.value(f"{case}: {name} a step, k20 / sync", k20 / sync, 1 / 8, most=True)


def _plot(path: Path, case: str, runs: dict[str, list[Run]]) -> None:
    ks = [k for k in KS if f"k{k}" in runs]
    if not ks:
        return

    def median(system: str) -> float:
        return statistics.median(run.samples_per_s for run in runs[system])

    lines = {"merged every k steps": [median(f"k{k}") for k in ks]}
    for system, name in (("sync", "sync"), ("never", "two that never talk"), ("ddp", "PyTorch DDP"),
                         ("semisync", "TorchRec semi-sync")):
        if system in runs:
            lines[name] = [median(system)] * len(ks)
    model, _, rate = case.partition("_")
    write_svg(path, f"{model.upper()}, two hosts, {rate}/s", "k (steps between merges)", "samples/s",
              [float(k) for k in ks], lines)
    print(f"plot: {path}")


# ---------------------------------------------------------------- runs


def _kind(system: str) -> Callable[..., Run | None]:
    return {"never": _never, "ddp": _peer, "semisync": _peer}.get(system, _together)


def _job(options: MergeBench, model: str, system: str, folder: Path, run_dir: Path) -> list[str]:
    """Words that train by one of this package's systems."""
    steps = options.warm + options.steps
    tree: dict[str, Any] = {
        "model": {"name": model}, "embedding": {"dim": WIDTH},
        "data": {"files": [str(folder / "train.tsv")], "batch_size": options.batch, "shuffle_blocks": 1},
        "train": {"batches_per_pass": options.pass_steps, "max_steps": steps, "log_every": steps}}
    if system == "sync":
        tree |= {"merge": {"dense": "sync"}, "rows": {"replica": "world"}}
    elif system != "never":
        k = int(system[1:])
        tree |= {"merge": {"k": k}, "rows": {"replica": "rank", "k_rows": k}}
    job = folder / f"{system}.yaml"
    write_json(job, tree)  # JSON is YAML
    return [sys.executable, "-m", "hpc_ctr.cli.main", "train", str(job), "--run_dir", str(run_dir), "--overwrite", "true"]


def _together(hosts: TwoHosts, options: MergeBench, model: str, system: str, folder: Path) -> Run:
    run_dir = folder / "run"
    before = hosts.sent()
    done = hosts.mpirun(_job(options, model, system, folder, run_dir))
    after = hosts.sent()
    if done.returncode:
        raise UsageError(f"training failed ({system}): {done.stderr.strip()[-2000:]}")
    told, steps = read_summary(run_dir), options.warm + options.steps
    link = after[0] - before[0] - hosts.header_bytes * (after[1] - before[1])
    dense = "dense_grad" if system == "sync" else "dense_merge"
    traced = sum(links.get("other_node", 0) for links in told["bytes"].values())
    return Run(_rate(run_dir, options), link / steps, traced / steps,
               told["bytes"][dense]["other_node"] / steps, told["exchanges"][dense]["seconds"] / steps)


def _rate(run_dir: Path, options: MergeBench) -> float:
    """Samples/s of the passes after the warm-up."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines if line["kind"] == "pass" and line["step"] > options.warm]
    return sum(line["samples"] for line in timed) / sum(line["seconds"] for line in timed)


def _never(hosts: TwoHosts, options: MergeBench, model: str, system: str, folder: Path) -> Run:
    """Two jobs of one rank at once, one a host and core: what could be done if there was nothing to tell each other."""
    cores = sorted(os.sched_getaffinity(0))
    runs = [folder / f"alone-{i}" for i in range(2)]
    environment = {**MPI_ENVIRONMENT, **os.environ}
    started = [subprocess.Popen(
        hosts.command(i, ["taskset", "-c", str(cores[i % len(cores)]), *_job(options, model, system, folder, run)]),
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for i, run in enumerate(runs)]
    for each in started:
        _, said = each.communicate()
        if each.returncode:
            raise UsageError(f"training failed (never): {said.strip()[-2000:]}")
    return Run(sum(_rate(run, options) for run in runs))


def _peer(hosts: TwoHosts, options: MergeBench, model: str, system: str, folder: Path) -> Run | None:
    """Another trainer on the same batches and towers."""
    out = folder / "peer.json"
    out.unlink(missing_ok=True)
    settings = {"system": system, "model": model, "data": str(folder / "train.tsv"), "batch": options.batch,
                "warm": options.warm, "steps": options.steps, "ids": options.ids, "width": WIDTH,
                "address": f"tcp://{hosts.addresses[0]}:29511", "out": str(out)}
    devices = ",".join(hosts.devices)  # each host has one of them
    before = hosts.sent()
    done = hosts.mpirun([sys.executable, "-m", "hpc_ctr.bench.merge_peers", json.dumps(settings)],
                        env={"HPC_CTR_BENCH_DEVICES": devices})
    after = hosts.sent()
    if done.returncode:
        missing_module = [line for line in done.stderr.splitlines() if "ModuleNotFoundError" in line]
        if missing_module:
            raise ModuleNotFoundError(missing_module[-1].split(":", 1)[-1].strip())
        raise UsageError(f"the peer failed ({system}): {done.stderr.strip()[-2000:]}")
    told = json.loads(out.read_text())
    link = after[0] - before[0] - hosts.header_bytes * (after[1] - before[1])
    return Run(told["samples_per_s"], link / (options.warm + options.steps))
