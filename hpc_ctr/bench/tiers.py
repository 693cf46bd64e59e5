"""``hpc-ctr bench tiers``: training from a table ten times as large as its memory, beside the same run in memory."""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_ctr.bench.common import Results, Targets, run_ranks
from hpc_ctr.bench.device import no_direct_reads, reads_per_second
from hpc_ctr.bench.store_data import LAYOUT
from hpc_ctr.cluster.disks import disk_of
from hpc_ctr.cluster.memory import memory
from hpc_ctr.data.synthetic import SyntheticOptions, write_synthetic
from hpc_ctr.errors import UsageError
from hpc_ctr.report.run_folder import write_json
from hpc_ctr.storage.tiered import budget_for
from hpc_ctr.train.plan import PASS_SHARE
from hpc_ctr.units import format_bytes

CASES = {"zipf13": 1.3, "zipf11": 1.1}
_SPARE = 1 << 30
_STEPS = 200  # of the check on one rank, at most


@dataclass(frozen=True)
class TiersBench:
    """What to measure. keys: rows of the table; samples: trained on in a run, the first ``warm`` share of them untimed;
    ranks: started by the benchmark itself; batch: samples a rank and step; rounds: runs of each kind, in turns; dir:
    where the files go; keep: leave them there.
    """

    keys: int = 20_000_000
    samples: int = 2_000_000
    ranks: int = 2
    batch: int = 2048
    rounds: int = 3
    warm: float = 1 / 3
    dir: Path = Path("runs/bench-tiers")
    keep: bool = False
    cases: list[str] = field(default_factory=lambda: list(CASES))

    def check(self) -> None:
        """Raises UsageError naming the option."""
        check_counts(self, "keys", "samples", "ranks", "batch", "rounds")
        if wrong := [case for case in self.cases if case not in CASES]:
            raise UsageError(f"--cases: {wrong[0]!r} is not one of {', '.join(CASES)}")


@dataclass(frozen=True)
class Run:
    """What a run reported. Rates are over the samples after the warm-up; cold: rows read from disk a sample; miss: share
    of the rows that were looked up and came from disk; direct: bytes that the disk delivered over those that the store
    read; losses: summed over the samples of each step, as exact texts."""

    samples_per_s: float
    cold: float
    miss: float
    direct: float
    losses: list[str]
    memory: list[dict[str, int]]


def bench_tiers(results: Results, options: TiersBench) -> Targets:
    """Measure, and return what the project promises beside what came out. Raises UsageError."""
    options.check()
    in_memory = memory_budget(options.keys, options.ranks) * options.ranks
    if in_memory * (1 - PASS_SHARE) > memory().available:
        raise UsageError(f"--keys: the run in memory takes {format_bytes(in_memory * (1 - PASS_SHARE))} and "
                         f"{format_bytes(memory().available)} is available; take fewer keys")
    targets = Targets()
    with scratch(options.dir, options.keys, options.samples, options.keep) as folder:
        results.machine["disk"] = describe_disk(folder)
        device = device_rate(folder, options.keys, options.rounds)
        for case in options.cases:
            _case(results, targets, options, case, folder, device)
        if options.ranks > 1:
            _one_rank(targets, options, folder)
    return targets


def _case(results: Results, targets: Targets, options: TiersBench, case: str, folder: Path, device: float) -> None:
    data = make_data(folder / case, options.keys, options.samples, CASES[case])
    budgets = {"in_memory": memory_budget(options.keys, options.ranks),
               "tenth": tenth_budget(options.keys, options.ranks)}
    runs: dict[str, list[Run]] = {name: [] for name in budgets}
    for number in range(options.rounds):
        for name in list(budgets)[::1 if number % 2 == 0 else -1]:
            runs[name].append(train(data, folder, budgets[name], options.ranks, options.batch, options.warm))
    fast, tenth = runs["in_memory"], runs["tenth"]
    for name, done in runs.items():
        results.add(case, name, "samples/s", [run.samples_per_s for run in done])
    bounds = [min(f.samples_per_s, device / t.cold if t.cold else f.samples_per_s) for f, t in zip(fast, tenth)]
    results.add(case, "bound", "samples/s", bounds)
    results.add(case, "tenth_cold_rows", "rows/sample", [run.cold for run in tenth])
    results.add(case, "tenth_miss_rate", "share", [run.miss for run in tenth])
    told = f"{case}: host budget {format_bytes(budgets['tenth'])} a rank, a tenth of {options.keys:,} rows"
    print(f"{told} of {LAYOUT.stored_bytes} bytes; the disk delivered {tenth[0].direct:.2f} of the bytes that the store "
          "read" + ("" if tenth[0].direct > 0.9 else ": the page cache served the rest, and the figures are too high"))
    if warm := sum(run.cold for run in fast):
        print(f"{case}: in_memory read {warm / len(fast):.3g} rows a sample from disk: it was not in memory")
    same = all(run.losses == fast[0].losses for run in fast + tenth)
    targets.value(f"{case}: equal loss series on {_ranks(options.ranks)}, 1 = bit for bit", float(same), 1)
    against = "in_memory" if case == "zipf13" else "bound"
    targets.ratio(results, case, "tenth", against, 0.8)
    _tell_memory(targets, case, tenth)


def _tell_memory(targets: Targets, case: str, runs: list[Run]) -> None:
    """The largest process of the runs beside what it was planned to be: itself without rows, and its budget."""
    each = max((memory for run in runs for memory in run.memory), key=lambda m: m["peak"] / (m["before"] + m["budget"]))
    planned = each["before"] + each["budget"]
    print(f"{case}: plan of a rank {format_bytes(planned)}: {format_bytes(each['before'])} without rows and a host "
          f"budget of {format_bytes(each['budget'])}; peak RSS {format_bytes(each['peak'])}")
    targets.value(f"{case}: peak RSS / plan", each["peak"] / planned, 1.1, most=True)


def _one_rank(targets: Targets, options: TiersBench, folder: Path) -> None:
    """The loss series of a tenth of the keys and samples on one rank, in memory and not."""
    keys = max(options.keys // 10, min(options.keys, 100_000))
    batch = max(1, options.batch // 10)
    data = make_data(folder / "one_rank", keys, min(max(1, options.samples // 10), _STEPS * batch), CASES["zipf11"])
    one, other = (train(data, folder, budget, 1, batch, 0.0)
                  for budget in (memory_budget(keys, 1), tenth_budget(keys, 1)))
    print(f"one rank, {keys:,} rows: {len(one.losses)} steps, {other.miss:.1%} of the rows from disk")
    targets.value("equal loss series on one rank, 1 = bit for bit", float(one.losses == other.losses), 1)


def _ranks(n: int) -> str:
    return "one rank" if n == 1 else f"{n} ranks"


# ---------------------------------------------------------------- runs, which growth.py makes too


def check_counts(options: Any, *names: str) -> None:
    """Raises UsageError naming the option that is no count, or the warm-up that is no share."""
    for name in names:
        if getattr(options, name) < 1:
            raise UsageError(f"--{name}: must be at least 1, not {getattr(options, name)}")
    if not 0 <= options.warm < 1:
        raise UsageError(f"--warm: must be at least 0 and below 1, not {options.warm}")


class scratch:
    """A new folder below ``dir`` with room for a table and its data, removed at the end unless ``keep``."""

    def __init__(self, dir: Path, keys: int, samples: int, keep: bool):
        need = int(keys * LAYOUT.stored_bytes * 3.2) + 3 * samples * 300 + _SPARE * (keys >= 1_000_000)
        dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(dir).free
        if need > free:
            raise UsageError(f"--dir: {dir} has {format_bytes(free)} free and {keys:,} rows take up to "
                             f"{format_bytes(need)}; choose another disk or fewer rows")
        self.folder, self.keep = Path(tempfile.mkdtemp(prefix="tiers-", dir=dir)).resolve(), keep

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, *_: Any) -> None:
        if self.keep:
            print(f"files are kept in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def describe_disk(folder: Path) -> str:
    """File system and device below a folder."""
    disk = disk_of(folder)
    return f"{disk.filesystem}, {disk.device}"


def device_rate(folder: Path, keys: int, runs: int) -> float:
    """The disk's 4 KiB reads/s at depth 32, the median of some runs. Raises UsageError."""
    if problem := no_direct_reads(folder):
        raise UsageError(problem)
    found = sorted(reads_per_second(folder, keys * LAYOUT.stored_bytes, runs))
    print(f"device: {found[len(found) // 2]:,.0f} reads/s of 4 KiB", flush=True)
    return found[len(found) // 2]


def make_data(folder: Path, keys: int, samples: int, zipf: float) -> Path:
    """Generated clicks over ``keys`` ids in 26 fields; returns the folder."""
    write_synthetic(SyntheticOptions(rows=samples, test_rows=0, ids=keys, zipf=zipf, model="linear", latent=1), folder)
    return folder


def tenth_budget(keys: int, ranks: int) -> int:
    """Bytes a rank: a tenth of the table as it lies on disk."""
    return keys * LAYOUT.stored_bytes // 10 // ranks


def memory_budget(keys: int, ranks: int) -> int:
    """Bytes a rank with which all rows stay in memory."""
    rows = int(keys / ranks * 1.02) + 10_000  # owners differ a little in how many rows they have
    return int(budget_for(LAYOUT, rows, rows) / (1 - PASS_SHARE)) + 1


def train(data: Path, folder: Path, budget: int, ranks: int, batch: int, warm: float) -> Run:
    """DLRM on the data, from a table that has all its rows already, with a host budget of each rank in bytes."""
    steps = json.loads((data / "synthetic.json").read_text())["rows"] // (batch * ranks)
    tree = {"run_dir": str(folder / "run"), "model": {"name": "dlrm"}, "embedding": {"dim": LAYOUT.width},
            "data": {"files": [str(data / "train.tsv")], "batch_size": batch, "shuffle_blocks": 1},
            "train": {"batches_per_pass": min(100, max(1, steps // 4))},  # something is left after the warm-up
            "storage": {"dir": str(folder / "rows"), "host_budget": budget}}
    job, out = folder / "job.yaml", folder / "report.json"
    write_json(job, tree)  # JSON is YAML
    out.unlink(missing_ok=True)
    run_ranks(ranks, "hpc_ctr.bench.tiers_job", [str(job), str(data), str(out)])
    shutil.rmtree(folder / "rows", ignore_errors=True)
    return summarise(json.loads(out.read_text()), warm)


def summarise(report: dict[str, Any], warm: float) -> Run:
    """The rates of a report over the passes that begin after ``warm`` of the samples. Raises UsageError when there are
    none."""
    passes = report["passes"]
    total, done, first = sum(p["samples"] for p in passes), 0, 0
    while first < len(passes) and done < warm * total:
        done += passes[first]["samples"]
        first += 1
    if first == len(passes):
        raise UsageError(f"--samples: {total:,} are not enough: nothing is left to time after the warm-up")
    timed = passes[first:]

    def grew(name: str) -> int:
        return timed[-1][name] - (passes[first - 1][name] if first else 0)

    samples, seconds = sum(p["samples"] for p in timed), sum(p["seconds"] for p in timed)
    cold, host = grew("cold_hits"), grew("host_hits")
    read = grew("bytes_read")
    return Run(samples / seconds, cold / samples, cold / max(1, cold + host), grew("disk_read") / read if read else 1.0,
               report["losses"], report["memory"])
