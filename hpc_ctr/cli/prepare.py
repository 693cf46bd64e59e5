"""hpc-ctr prepare: data to train on, generated or fetched."""

import argparse
import os
import sys
import time
from dataclasses import fields

from hpc_ctr.comm.session import launched_rank
from hpc_ctr.errors import EXIT_DONE

EXAMPLES = """
synthetic: hpc-ctr prepare synthetic --rows 2000000 --test-rows 200000 --model pairwise --out data/synthetic
           hpc-ctr train data/synthetic/job.yaml
movielens: hpc-ctr prepare movielens --out data/ml-100k
"""
_HELP = {
    "rows": "training rows", "test_rows": "test rows", "fields": "categorical fields",
    "ids": "different ids, in all over the fields", "zipf": "exponent of the ids' power law within a field",
    "dense": "columns of counts", "model": "linear, or pairwise: with inner products of all pairs of fields",
    "seed": "of the click model and of all rows", "missing": "share of empty cells", "click_rate": "mean click rate",
    "linear_std": "standard deviation of the linear term of the logit",
    "pair_std": "standard deviation of the pairwise term", "latent": "length of the latent vectors",
    "noise": "standard deviation of what no model can know"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add this subcommand."""
    from hpc_ctr.data.synthetic import MODELS, SyntheticOptions

    parser = subparsers.add_parser("prepare", help="generate or fetch data to train on", epilog=EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    one = whats.add_parser("synthetic", help="clicks from a known model, in Criteo format",
                           formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for option in fields(SyntheticOptions):
        one.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default,
                         choices=MODELS if option.name == "model" else None, help=_HELP[option.name])
    one.add_argument("--out", required=True, default=argparse.SUPPRESS, metavar="DIR",
                     help="folder for train.tsv, test.tsv, job.yaml")
    one.set_defaults(run=run)
    two = whats.add_parser("movielens", help="MovieLens-100K from the RecBole wheel on PyPI")
    two.add_argument("--out", required=True, metavar="DIR", help="folder for the three files")
    two.add_argument("--wheel", default="", metavar="FILE", help="take this copy of the wheel; download nothing")
    two.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    if launched_rank() > 0:
        return EXIT_DONE  # started under mpirun it is the work of one process: several would write into the same files
    return _synthetic(args) if args.what == "synthetic" else _movielens(args)


def _synthetic(args: argparse.Namespace) -> int:
    from hpc_ctr.data.synthetic import SyntheticOptions, write_synthetic

    options = SyntheticOptions(**{option.name: getattr(args, option.name) for option in fields(SyntheticOptions)})
    begin = time.monotonic()
    done = 0

    def progress(rows: int, total: int) -> None:
        nonlocal done
        done = rows
        if sys.stderr.isatty():
            print(f"\r{rows:,} of {total:,} rows", end="" if rows < total else "\n", file=sys.stderr, flush=True)

    summary = write_synthetic(options, args.out, progress)
    took = f" in {time.monotonic() - begin:.0f} s" if done else ", which was there already"
    print(f"{args.out}: {summary['rows']:,} training and {summary['test_rows']:,} test rows{took}, click rate "
          f"{summary['click_rate']:.4f}")
    if summary["best_auc"] is not None:
        print(f"best possible AUC {summary['best_auc']:.4f} on these {'test' if options.test_rows else 'training'} "
              f"rows (expected {summary['expected_auc']:.4f}), logloss {summary['best_logloss']:.4f}")
    print(f"train on it: hpc-ctr train {os.path.join(args.out, 'job.yaml')}")
    return 0


def _movielens(args: argparse.Namespace) -> int:
    from hpc_ctr.data.movielens import prepare

    prepare(args.out, args.wheel)
    return 0
