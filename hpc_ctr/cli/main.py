"""hpc-ctr: the command line. One file a subcommand; this one finds and runs it."""

import argparse
import importlib
import os
import sys

from hpc_ctr import __version__
from hpc_ctr.comm.session import run_and_exit
from hpc_ctr.errors import UsageError

COMMANDS = ("train", "evaluate", "prepare", "doctor", "store", "bench")


def make_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; each module in this package adds its own."""
    parser = _Parser(prog="hpc-ctr", description="Train click models with embedding tables larger than memory, on MPI.")
    parser.add_argument("--version", action="version", version=f"hpc-ctr {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name in COMMANDS:
        importlib.import_module(f"hpc_ctr.cli.{name}").add_parser(subparsers)
    return parser


def parse_overrides(words: list[str]) -> dict[str, str]:
    """``--merge.k 20 --data.shuffle=false`` as {"merge.k": "20", "data.shuffle": "false"}. Raises UsageError."""
    out: dict[str, str] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if not word.startswith("--") or len(word) < 3:
            raise UsageError(f"{word!r} is not expected here; settings are given as --section.name value")
        name, equals, value = word[2:].partition("=")
        if not equals:
            at += 1
            if at == len(words) or (words[at].startswith("--") and len(words[at]) > 2):
                raise UsageError(f"--{name}: a value is missing; write --{name} VALUE")
            value = words[at]
        if not all(name.split(".")):
            raise UsageError(f"--{name}: this is not the name of a setting; write --section.name VALUE")
        out[name] = value
        at += 1
    return out


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are UsageErrors, so that one place prints them, once over all ranks."""

    def error(self, message: str) -> None:
        raise UsageError(f"{message}; see {self.prog} --help")


def _run(argv: list[str]) -> int:
    try:
        os.getcwd()  # libraries that are loaded later die of it, without a word that helps
    except FileNotFoundError:
        raise UsageError("the current folder is no longer there; change to one that is, and start again") from None
    args, rest = make_parser().parse_known_args(argv)
    args.overrides = parse_overrides(rest)
    if args.overrides and not getattr(args, "takes_overrides", False):
        raise UsageError(f"--{next(iter(args.overrides))}: unknown option of hpc-ctr {args.command}; "
                         f"see hpc-ctr {args.command} --help")
    return args.run(args)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script. Exit codes: 0 done, 1 failed, 2 usage, 75 checkpointed, requeue."""
    run_and_exit(_run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
