"""``hpc-ctr bench store``: rows/s of the cold store beside other stores and the disk, in one run, in turns."""

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpc_ctr.bench import page_cache
from hpc_ctr.bench.common import Results, Targets
from hpc_ctr.bench.device import no_direct_reads
from hpc_ctr.bench.store_data import LAYOUT, ROW_BYTES, Workload, right
from hpc_ctr.bench.store_files import H5py, Lmdb, Memmap
from hpc_ctr.bench.store_own import DeviceLimit, HpcCtr
from hpc_ctr.bench.store_rocksdb import RocksBest, RocksDefault
from hpc_ctr.bench.system import System
from hpc_ctr.cluster.disks import disk_of
from hpc_ctr.errors import HpcCtrError, UsageError
from hpc_ctr.storage.host_cache import FLOOR_ROWS
from hpc_ctr.storage.tiered import budget_for
from hpc_ctr.units import format_bytes

KINDS: dict[str, type[System]] = {kind.name: kind for kind in (HpcCtr, RocksBest, RocksDefault, Lmdb, Memmap, H5py,
                                                               DeviceLimit)}
CASES = ("get_uniform", "get_zipf", "get_together", "put")
PUTS = 20  # of a batch each make one figure, compaction and all
_WARM = 4
_SPARE = 2 << 30


@dataclass(frozen=True)
class StoreBench:
    """What to measure. rows: of the table; batch: distinct keys of a get or put (0: 100,000, less for a small table);
    rounds: figures of each system and case; zipf: exponent of get_zipf; memory: bytes for rows in memory in get_zipf,
    for each system; age: rows that are put before puts are measured, in tables; dir: where the files go; keep: leave
    them there.
    """

    rows: int = 20_000_000
    batch: int = 0
    rounds: int = 5
    zipf: float = 1.1
    memory: int = 512 << 20
    age: float = 1.0
    dir: Path = Path("runs/bench-store")
    keep: bool = False
    systems: list[str] = field(default_factory=lambda: list(KINDS))
    cases: list[str] = field(default_factory=lambda: list(CASES))

    def check(self) -> None:
        """Raises UsageError naming the option."""
        for option, names, known in (("systems", self.systems, KINDS), ("cases", self.cases, CASES)):
            if wrong := [name for name in names if name not in known]:
                raise UsageError(f"--{option}: {wrong[0]!r} is not one of {', '.join(known)}")
        if self.rows < 1000:
            raise UsageError(f"--rows: {self.rows} is too few to measure anything; at least 1000")
        if self.rounds < 1:
            raise UsageError(f"--rounds: must be at least 1, not {self.rounds}")
        if self.size < 1 or self.size * self.rounds > self.rows:
            raise UsageError(f"--batch: {self.rounds} rounds of {self.size} different keys need a table of "
                             f"{self.size * self.rounds} rows and --rows is {self.rows}")
        if self.memory < (least := budget_for(LAYOUT, FLOOR_ROWS, self.rows)):
            raise UsageError(f"--memory: {format_bytes(self.memory)} do not hold the index of {self.rows:,} rows; give "
                             f"at least {format_bytes(least)}")
        if self.age < 0:
            raise UsageError(f"--age: must be at least 0, not {self.age}")

    @property
    def size(self) -> int:
        """Keys of a batch."""
        return self.batch or min(100_000, self.rows // 20)


def bench_store(results: Results, options: StoreBench) -> Targets:
    """Measure, and return what the project promises beside what came out. Raises UsageError."""
    options.check()
    kinds = available(options.systems)
    check_space(options.dir, options.rows, kinds)
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=options.dir))
    systems: list[System] = []
    try:
        if DeviceLimit in kinds and (problem := no_direct_reads(folder)):
            print(f"device_limit is left out: {problem}")
            kinds.remove(DeviceLimit)
            if not kinds:
                raise UsageError(problem)
        work = Workload(options.rows, options.size, options.zipf)
        for kind in kinds:
            begin = time.perf_counter()
            systems.append(kind(folder / kind.name, work, options.memory))
            systems[-1].load()
            print(f"{kind.name}: {options.rows:,} rows loaded in {time.perf_counter() - begin:.1f} s", flush=True)
        _tell_page_cache(results, systems)
        for case in CASES:
            if case in options.cases:
                _CASES[case](results, options, systems, work)
        return targets(results)
    finally:
        for system in systems:
            system.close()
        if options.keep:
            print(f"files are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def available(names: list[str]) -> list[type[System]]:
    """The systems of these names that are installed; says in one line which is not. Raises UsageError."""
    kinds = []
    for name in KINDS:
        if name not in names:
            continue
        module = KINDS[name].module
        if module and importlib.util.find_spec(module) is None:
            print(f"{name} is left out: {module} is not installed (bash scripts/setup.sh --bench installs it)")
        else:
            kinds.append(KINDS[name])
    if not kinds:
        raise UsageError("--systems: none of them is installed; run bash scripts/setup.sh --bench")
    return kinds


def check_space(folder: Path, rows: int, kinds: list[type[System]]) -> None:
    """Raises UsageError when the disk has no room for all systems at once."""
    need = rows * sum(kind.disk_row for kind in kinds) + _SPARE * (rows >= 1_000_000)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UsageError(f"--dir: {folder} has {format_bytes(free)} free and {rows:,} rows in {len(kinds)} systems take "
                         f"up to {format_bytes(need)}; choose another disk, fewer --rows or fewer --systems")


def _tell_page_cache(results: Results, systems: list[System]) -> None:
    disk = disk_of(systems[0].folder)
    results.machine["disk"] = f"{disk.filesystem}, {disk.device}"
    for system in systems:
        system.drop()
    share = page_cache.resident_share([path for system in systems for path in system.files()])
    how = "dropped before every measurement (fsync, posix_fadvise)"
    results.machine["page_cache"] = f"{how}; {share:.1%} of the files stayed in it"
    print(f"page cache: {how}; {share:.1%} of the files stayed in it"
          + ("" if share < 0.05 else ": this file system keeps them, and figures of buffered reads are too high"))


# ---------------------------------------------------------------- cases


def _alternate(systems: list[System], rounds: int, measure: Callable[[System, int], float]) -> dict[str, list[float]]:
    """``rounds`` figures of each system, in turns, in another order each time."""
    runs: dict[str, list[float]] = {system.name: [] for system in systems}
    for number in range(rounds):
        for at in range(len(systems)):
            system = systems[(at + number) % len(systems)]
            runs[system.name].append(measure(system, number))
    return runs


def _report(results: Results, case: str, runs: dict[str, list[float]]) -> None:
    for name, figures in runs.items():
        results.add(case, name, "rows/s", figures)


def _timed_get(system: System, keys: np.ndarray, version: int = -1) -> float:
    system.drop()
    packed = system.pack_get(keys)
    begin = time.perf_counter()
    result = system.get(packed)
    seconds = time.perf_counter() - begin
    words = system.words(result)
    if words is not None and not right(words, keys, version):
        raise HpcCtrError(f"{system.name} gave back other rows than were asked for: its figures mean nothing; "
                          "check the disk and its version")
    return len(keys) / seconds


def _get_uniform(results: Results, options: StoreBench, systems: list[System], work: Workload) -> None:
    for system in systems:
        system.prepare("get_uniform")
        _timed_get(system, work.uniform("warm", 0)[:1000])  # compiles kernels, starts threads
    runs = _alternate(systems, options.rounds, lambda system, i: _timed_get(system, work.uniform("get", i)))
    _report(results, "get_uniform", runs)


def _get_zipf(results: Results, options: StoreBench, systems: list[System], work: Workload) -> None:
    warm = [work.popular("warm", i) for i in range(_WARM)]
    for system in systems:
        system.prepare("get_zipf")
        for keys in warm if system.caches else [warm[0][:1000]]:
            _timed_get(system, keys)
    batches = [work.popular("get", i) for i in range(options.rounds)]
    _report(results, "get_zipf", _alternate(systems, options.rounds, lambda s, i: _timed_get(s, batches[i])))


def _get_together(results: Results, options: StoreBench, systems: list[System], work: Workload) -> None:
    groups = work.uniform("together", 0, options.rounds).reshape(options.rounds, -1)
    for system in systems:
        system.prepare("put")
        if not system.in_place:  # others have their rows where they always are
            for keys in groups:
                system.put(system.pack_put(keys, work.records(keys, 1)))
            system.settle()
        system.prepare("get_together")
        _timed_get(system, work.uniform("warm", 1)[:1000])
    order = np.random.default_rng(work.seed).permutation(options.rounds)
    runs = _alternate(systems, options.rounds,
                      lambda system, i: _timed_get(system, groups[order[i]], -1 if system.in_place else 1))
    _report(results, "get_together", runs)


def _put(results: Results, options: StoreBench, systems: list[System], work: Workload) -> None:
    aging = int(options.age * options.rows / options.size)
    written: dict[str, float] = {}
    put_rows: dict[str, int] = {system.name: 0 for system in systems}

    def put_batches(system: System, first: int, count: int) -> float:
        """Puts, until nothing goes on in the background; returns rows/s."""
        seconds = 0.0
        before = page_cache.bytes_written()
        for number in range(first, first + count):
            keys = work.uniform("put", number)
            packed = system.pack_put(keys, work.records(keys, 2 + number))
            begin = time.perf_counter()
            system.put(packed)
            seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        system.settle()
        seconds += time.perf_counter() - begin
        after = page_cache.bytes_written()
        if before is not None and after is not None:
            written[system.name] = written.get(system.name, 0) + after - before
        put_rows[system.name] += count * options.size
        return count * options.size / seconds

    for system in systems:
        system.prepare("put")
        if aging and not system.in_place:
            put_batches(system, 0, aging)

    def measure(system: System, number: int) -> float:
        system.drop()
        count = 1 if system.in_place else PUTS
        return put_batches(system, aging + number * PUTS, count)

    _report(results, "put", _alternate(systems, options.rounds, measure))
    for system in systems:
        if not system.in_place and system.name in written:
            factor = written[system.name] / (put_rows[system.name] * ROW_BYTES)
            results.add("write_amplification", system.name, "x", [factor])


_CASES: dict[str, Callable[[Results, StoreBench, list[System], Workload], None]] = {
    "get_uniform": _get_uniform, "get_zipf": _get_zipf, "get_together": _get_together, "put": _put}


def targets(results: Results) -> Targets:
    """What the store is meant to reach, beside what was measured in this run."""
    out = Targets()
    for case in ("get_uniform", "get_zipf"):
        for factor, peer in ((1.2, "rocksdb_best"), (5.0, "rocksdb_default"), (1.0, "device_limit")):
            out.ratio(results, case, "hpc_ctr", peer, factor)
    own = results.median("put", "hpc_ctr")
    puts = [results.median("put", name) for name in ("rocksdb_best", "rocksdb_default")]
    fast = max((median for median in puts if median is not None), default=None)
    out.value("put: hpc_ctr / the faster RocksDB", own / fast if own is not None and fast else None, 3.0)
    out.ratio(results, "get_together", "hpc_ctr", "rocksdb_best", 20.0)
    out.value("write amplification of hpc_ctr", results.median("write_amplification", "hpc_ctr"), 2.5, most=True)
    return out
