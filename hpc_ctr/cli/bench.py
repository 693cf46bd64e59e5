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
    for sub in (one, two, three):
        sub.add_argument("--json", default="", metavar="FILE", help="write the results to FILE")


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


def _finish(results, args: argparse.Namespace) -> int:
    if args.json:
        results.write(args.json)
    return 0
