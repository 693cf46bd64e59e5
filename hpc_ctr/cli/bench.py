"""hpc-ctr bench: measurements that anybody can repeat."""

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser("bench", help="measure, and compare with others in the same run")
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    one = whats.add_parser("movielens", help="test AUC on MovieLens-100K beside logistic regression")
    one.add_argument("--job", default="examples/movielens.yaml", help="job file")
    one.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="rank counts")
    one.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds")
    one.set_defaults(run=run_movielens)
    two = whats.add_parser("synthetic", help="test AUC on generated clicks beside logistic regression and the optimum")
    two.add_argument("--rows", type=int, default=2_000_000, help="training rows")
    two.add_argument("--dir", default="data/synthetic", help="where the generated files are kept")
    two.add_argument("--ranks", type=int, default=2, help="rank count")
    two.add_argument("--models", nargs="+", default=["deepfm", "dlrm"], help="models for the pairwise data")
    two.set_defaults(run=run_synthetic)
    three = whats.add_parser("open", help="seconds to open a cold store, beside reading its files")
    three.add_argument("--segments", type=int, default=100, help="segments of the store")
    three.add_argument("--rows", type=int, default=10_000_000, help="rows in all segments, of 192 + 16 bytes")
    three.add_argument("--runs", type=int, default=3, help="repetitions")
    three.add_argument("--dir", default="", help="where the store is made, on the disk to measure (removed afterwards)")
    three.set_defaults(run=run_open)
    for sub in (one, two, three, _add_store(whats), _add_tiers(whats), _add_growth(whats), _add_merge(whats)):
        sub.add_argument("--json", default="", metavar="FILE", help="write the results to FILE")


def _add_store(whats: argparse._SubParsersAction) -> argparse.ArgumentParser:
    sub = whats.add_parser("store", help="rows/s of the cold store beside RocksDB, LMDB, memmap, h5py and the disk",
                           formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sub.add_argument("--rows", type=int, default=20_000_000, help="rows of the table, 192 bytes and a key each")
    sub.add_argument("--batch", type=int, default=0,
                     help="different keys of a get or put; 0: 100000, less for a small table")
    sub.add_argument("--rounds", type=int, default=5, help="figures of each system and case, taken in turns")
    sub.add_argument("--zipf", type=float, default=1.1, help="exponent of the keys' popularity in get_zipf")
    sub.add_argument("--memory", default="512MiB", help="for rows in memory in get_zipf, for each system that keeps any")
    sub.add_argument("--age", type=float, default=1.0, help="how many times the table is put before puts are measured")
    sub.add_argument("--dir", default="runs/bench-store", help="folder for the stores, on the disk to measure")
    sub.add_argument("--keep", action="store_true", help="leave the stores there")
    sub.add_argument("--systems", nargs="+", metavar="NAME",
                     default=["hpc_ctr", "rocksdb_best", "rocksdb_default", "lmdb", "memmap", "h5py", "device_limit"],
                     help="what to measure")
    sub.add_argument("--cases", nargs="+", metavar="NAME", default=["get_uniform", "get_zipf", "get_together", "put"],
                     help="what to do with them")
    sub.set_defaults(run=run_store)
    return sub


def _add_tiers(whats: argparse._SubParsersAction) -> argparse.ArgumentParser:
    sub = whats.add_parser("tiers", help="training from a table ten times as large as its memory, beside one in memory",
                           formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sub.add_argument("--keys", type=int, default=20_000_000, help="rows of the table")
    sub.add_argument("--cases", nargs="+", metavar="NAME", default=["zipf13", "zipf11"], help="power laws of the ids")
    _add_runs(sub, "runs/bench-tiers")
    sub.set_defaults(run=run_tiers)
    return sub


def _add_growth(whats: argparse._SubParsersAction) -> argparse.ArgumentParser:
    sub = whats.add_parser("growth", help="training at a fixed host budget while the table grows",
                           formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sub.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000, 50_000_000],
                     help="rows of the tables")
    sub.add_argument("--budget", default="0", help="host memory over all ranks; 0: a tenth of the largest table")
    sub.add_argument("--zipf", type=float, default=1.1, help="exponent of the ids' power law")
    sub.add_argument("--plot", default="", metavar="FILE", help="also draw it, as SVG")
    _add_runs(sub, "runs/bench-growth")
    sub.set_defaults(run=run_growth)
    return sub


def _add_merge(whats: argparse._SubParsersAction) -> argparse.ArgumentParser:
    from hpc_ctr.bench.merge import CASES, SYSTEMS

    sub = whats.add_parser("merge", help="two ranks on two hosts with a slow network, merging seldom or in every step; "
                           "makes the hosts itself, on Linux, as root",
                           formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sub.add_argument("--ids", type=int, default=5_000_000, help="rows of the table")
    sub.add_argument("--zipf", type=float, default=1.1, help="exponent of the ids' power law")
    sub.add_argument("--steps", type=int, default=100, help="steps of a run that are timed")
    sub.add_argument("--warm", type=int, default=100, help="steps before them")
    sub.add_argument("--pass-steps", type=int, default=100, help="steps of a pass")
    sub.add_argument("--batch", type=int, default=2048, help="samples a rank and step")
    sub.add_argument("--rounds", type=int, default=3, help="runs of each kind, taken in turns")
    sub.add_argument("--delay-us", type=float, default=50, help="of the link, one way, in microseconds")
    sub.add_argument("--dir", default="runs/bench-merge", help="folder for data and runs")
    sub.add_argument("--cases", nargs="+", metavar="NAME", default=CASES, help="models and rates")
    sub.add_argument("--systems", nargs="+", metavar="NAME", default=SYSTEMS, help="what to measure")
    sub.add_argument("--plot", default="", metavar="FILE", help="also draw each case, as SVG")
    sub.set_defaults(run=run_merge)
    return sub


def _add_runs(sub: argparse.ArgumentParser, folder: str) -> None:
    sub.add_argument("--samples", type=int, default=2_000_000, help="samples of a run")
    sub.add_argument("--warm", type=float, default=1 / 3, help="share of them that is trained on before the clock starts")
    sub.add_argument("--ranks", type=int, default=2, help="ranks, started by this command: one a core")
    sub.add_argument("--batch", type=int, default=2048, help="samples a rank and step")
    sub.add_argument("--rounds", type=int, default=3, help="runs of each kind, taken in turns")
    sub.add_argument("--dir", default=folder, help="folder for data and rows, on the disk to measure")
    sub.add_argument("--keep", action="store_true", help="leave the files there")


def run_tiers(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr.bench.common import Results
    from hpc_ctr.bench.tiers import TiersBench, bench_tiers

    results = Results()
    targets = bench_tiers(results, TiersBench(args.keys, args.samples, args.ranks, args.batch, args.rounds, args.warm,
                                              Path(args.dir), args.keep, args.cases))
    return _finish(results, args, targets)


def run_growth(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr.bench.common import Results
    from hpc_ctr.bench.growth import GrowthBench, bench_growth
    from hpc_ctr.units import parse_bytes

    results = Results()
    budget = 0 if args.budget == "0" else parse_bytes(args.budget, "--budget")
    targets = bench_growth(results, GrowthBench(args.sizes, budget, args.samples, args.zipf, args.ranks, args.batch,
                                                args.rounds, args.warm, Path(args.dir), args.keep, args.plot))
    return _finish(results, args, targets)


def run_merge(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr.bench.common import Results
    from hpc_ctr.bench.merge import MergeBench, bench_merge

    results = Results()
    options = MergeBench(args.ids, args.zipf, args.steps, args.warm, args.pass_steps, args.batch, args.rounds,
                         args.delay_us, Path(args.dir), args.cases, args.systems, args.plot)
    return _finish(results, args, bench_merge(results, options))


def run_store(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr.bench.common import Results
    from hpc_ctr.bench.store import StoreBench, bench_store
    from hpc_ctr.units import parse_bytes

    results = Results()
    options = StoreBench(args.rows, args.batch, args.rounds, args.zipf, parse_bytes(args.memory, "--memory"), args.age,
                         Path(args.dir), args.keep, args.systems, args.cases)
    return _finish(results, args, bench_store(results, options))


def run_movielens(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr.bench.common import Results
    from hpc_ctr.bench.quality import movielens

    results = Results()
    movielens(results, Path(args.job), args.ranks, args.seeds)
    return _finish(results, args)


def run_synthetic(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr.bench.common import Results
    from hpc_ctr.bench.quality import LR_SETTINGS, PAIR_SETTINGS, synthetic

    results = Results()
    synthetic(results, Path(args.dir), args.rows, args.ranks, args.models, LR_SETTINGS, PAIR_SETTINGS)
    return _finish(results, args)


def run_open(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr.bench.common import Results
    from hpc_ctr.bench.open import opening

    results = Results()
    opening(results, args.dir, args.segments, args.rows, args.runs)
    return _finish(results, args)


def _finish(results, args: argparse.Namespace, targets=None) -> int:
    if args.json:
        results.write(args.json)
    if targets is not None:
        targets.print()
    return 0
