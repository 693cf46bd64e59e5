"""hpc-ctr evaluate: metrics of a checkpoint on the job's test data."""

import argparse


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser(
        "evaluate", help="evaluate a checkpoint on the test data, on any number of ranks",
        epilog="Settings of the run can be changed as --section.name VALUE, for instance --data.test_files '[day_23]'.")
    parser.add_argument("where", help="run folder (its last complete checkpoint), or a checkpoint's folder")
    parser.add_argument("--json", default="", metavar="FILE", help="also write the metrics to FILE")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr import api
    from hpc_ctr.cluster.launch import start_job
    from hpc_ctr.comm.session import together
    from hpc_ctr.report.run_folder import to_json, write_json

    session = start_job()
    metrics = api.evaluate(args.where, args.overrides, session)
    if session.is_root:
        print(to_json(metrics))
    with together(session.comm):
        if session.is_root and args.json:
            write_json(args.json, metrics)
    return 0
