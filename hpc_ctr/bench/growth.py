"""``hpc-ctr bench growth``: what a growing table costs at a fixed host budget, beside what its misses explain."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from hpc_ctr.bench.common import Results, Targets
from hpc_ctr.bench.plot import write_svg
from hpc_ctr.bench.tiers import Run, check_counts, describe_disk, device_rate, make_data, scratch, tenth_budget, train
from hpc_ctr.errors import UsageError
from hpc_ctr.units import format_bytes


@dataclass(frozen=True)
class GrowthBench:
    """What to measure. sizes: rows of the tables; budget: bytes of host memory over all ranks (0: a tenth of the largest
    table); zipf: of the ids; plot: an SVG file ("" = none); the others as in TiersBench.
    """

    sizes: list[int] = field(default_factory=lambda: [1_000_000, 10_000_000, 50_000_000])
    budget: int = 0
    samples: int = 2_000_000
    zipf: float = 1.1
    ranks: int = 2
    batch: int = 2048
    rounds: int = 3
    warm: float = 1 / 3
    dir: Path = Path("runs/bench-growth")
    keep: bool = False
    plot: str = ""

    def check(self) -> None:
        """Raises UsageError naming the option."""
        if sorted(set(self.sizes)) != list(self.sizes) or self.sizes[0] < 1:
            raise UsageError(f"--sizes: must be ascending numbers of rows, not {self.sizes}")
        check_counts(self, "samples", "ranks", "batch", "rounds")


def bench_growth(results: Results, options: GrowthBench) -> Targets:
    """Measure, print a table, and plot. Raises UsageError."""
    options.check()
    largest = options.sizes[-1]
    budget = options.budget // options.ranks if options.budget else tenth_budget(largest, options.ranks)
    runs: dict[int, list[Run]] = {size: [] for size in options.sizes}
    targets = Targets()
    with scratch(options.dir, largest, options.samples, options.keep) as folder:
        results.machine["disk"] = describe_disk(folder)
        device = device_rate(folder, largest, options.rounds)
        data = {size: make_data(folder / str(size), size, options.samples, options.zipf) for size in options.sizes}
        for number in range(options.rounds):
            for size in options.sizes[::1 if number % 2 == 0 else -1]:
                runs[size].append(train(data[size], folder, budget, options.ranks, options.batch, options.warm))
    for size, done in runs.items():
        results.add("growth", f"{size}_rows", "samples/s", [run.samples_per_s for run in done])
    for size, done in runs.items():
        results.add("growth_miss_rate", f"{size}_rows", "share", [run.miss for run in done])
    measured = {size: statistics.median(run.samples_per_s for run in done) for size, done in runs.items()}
    cold = {size: statistics.median(run.cold for run in done) for size, done in runs.items()}
    expected = explained(measured[options.sizes[0]], cold, device)
    print(f"host budget {format_bytes(budget)} a rank, {options.ranks} ranks, Zipf {options.zipf:g}")
    print(f"{'rows':>12s} {'samples/s':>12s} {'explained':>12s} {'cold/sample':>12s} {'miss rate':>10s}")
    for size, done in runs.items():
        miss = statistics.median(run.miss for run in done)
        print(f"{size:12,d} {measured[size]:12,.0f} {expected[size]:12,.0f} {cold[size]:12.3f} {miss:10.2%}  "
              + "#" * round(40 * measured[size] / max(measured.values())))
        targets.value(f"growth to {size:,} rows: measured / explained", measured[size] / expected[size], 0.8)
    if options.plot:
        write_svg(Path(options.plot), f"Training at a fixed budget of {format_bytes(budget)} a rank",
                  "rows of the table", "samples/s", [float(size) for size in options.sizes],
                  {"measured": list(measured.values()), "explained by misses": list(expected.values())})
        print(f"plot: {options.plot}")
    return targets


def explained(smallest: float, cold: dict[int, float], device: float) -> dict[int, float]:
    """Samples/s of each table if nothing but its further misses cost time, each a read at the disk's own rate.

    smallest: samples/s of the first table; cold: rows a sample that came from disk; device: reads/s.
    """
    first = next(iter(cold.values()))
    return {size: 1 / (1 / smallest + max(0.0, rows - first) / device) for size, rows in cold.items()}
