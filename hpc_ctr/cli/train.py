"""hpc-ctr train: train a model as a job file says."""

import argparse

from hpc_ctr.cli.settings import settings_help

EXAMPLES = """
one process:    hpc-ctr train job.yaml
workstation:    mpirun -n 4 hpc-ctr train job.yaml
Slurm:          srun --mpi=pmix hpc-ctr train job.yaml --resume auto
other settings: hpc-ctr train job.yaml --merge.k 50 --embedding.dim 32

Any setting of the job file can be given as --section.name VALUE. Exit codes: 0 done, 1 failed, 2 wrong usage,
75 a signal came (SIGUSR1, SIGTERM), a checkpoint is written, and the job wants to be started again.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser("train", help="train a model as a job file says",
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.format_help = lambda: type(parser).format_help(parser) + EXAMPLES + "\n" + settings_help() + "\n"
    parser.add_argument("job", help="job file (YAML)")
    parser.add_argument("--resume", default="", metavar="auto|PATH",
                        help="continue: auto takes the run's last complete checkpoint, or starts anew where there is "
                             "none; PATH names a checkpoint or run folder")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    from hpc_ctr import api, config
    from hpc_ctr.cluster.launch import start_job
    from hpc_ctr.comm.session import together

    session = start_job()
    job = None
    with together(session.comm):
        job = config.load(args.job, args.overrides)
    return api.train(job, args.resume, session)
