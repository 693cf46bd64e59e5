"""hpc-ctr store: check, tidy up and look into what the SSD tier and checkpoints have on disk."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_ctr.errors import EXIT_DONE, EXIT_FAILED, UsageError
from hpc_ctr.units import format_bytes

EXAMPLES = """
all stores and checkpoints of a run:  hpc-ctr store verify runs/quickstart
one table of one rank:                hpc-ctr store inspect /local/hpc_ctr-run-1a2b3c4d/rank-0000/default
one file:                             hpc-ctr store inspect segment-0000000001.h5

DIR is one table's directory, a folder with several of them somewhere below it (of a rank, a run, storage.dir), a run
folder, a checkpoints folder or one checkpoint. verify and inspect only read, and work while a job uses the store.
Exit codes: 0 all is well, 1 something is damaged or the store is in use (compact), 2 there is no store in DIR.
"""
_WORDS_SHOWN = 8


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser("store", help="check, tidy up and look into the files of rows on SSD", epilog=EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    one = whats.add_parser("verify", help="read everything and say which files are damaged, and at which row")
    two = whats.add_parser("compact", help="rewrite segments that hold superseded rows (no job may use the store)")
    three = whats.add_parser("inspect", help="rows, live rows, bytes by segment; of a segment, its first rows")
    for sub, function in ((one, verify), (two, compact), (three, inspect)):
        sub.add_argument("where", metavar="DIR", help="a store, a folder above stores, a run or a checkpoint"
                         + (", or a segment file" if sub is three else ""))
        sub.set_defaults(run=function)
    three.add_argument("--json", action="store_true", help="print JSON")
    three.add_argument("--rows", type=int, default=3, metavar="N", help="rows shown of a segment file (default 3)")


def verify(args: argparse.Namespace) -> int:
    """Run ``store verify``; returns the exit code."""
    from hpc_ctr.checkpoint.verify import verify_checkpoints
    from hpc_ctr.storage import recovery

    stores, checkpoints = _targets(args.where)
    problems = []
    for directory in stores:
        problems += _with_bar(f"reading {directory}", lambda tell, at=directory: recovery.verify(at, tell))
    if checkpoints:
        problems += _with_bar(f"reading {checkpoints[0].parent}", lambda tell: verify_checkpoints(checkpoints, tell))
    for problem in problems:
        print(problem)
    if problems:
        return EXIT_FAILED
    print(f"{args.where}: nothing is damaged ({_count(len(stores), 'store')}, {_count(len(checkpoints), 'checkpoint')})")
    return EXIT_DONE


def compact(args: argparse.Namespace) -> int:
    """Run ``store compact``; returns the exit code."""
    from hpc_ctr.storage import manifest
    from hpc_ctr.storage.cold import ColdStore

    stores, _ = _targets(args.where)
    if not stores:
        raise UsageError(f"store compact: {args.where} has no store to write to; the segments of checkpoints are never "
                         "changed, old ones go when checkpoint.keep newer checkpoints are there")
    for directory in stores:
        state = manifest.load(directory)

        def work(tell: Callable[[int, int], None], at: str = directory, state: Any = state) -> tuple[int, int, int]:
            with ColdStore(at, state.layout, state.table, progress=tell) as store:
                before = store.disk_bytes
                store.compact()
                return before, store.disk_bytes, store.counters.rows_compacted

        before, after, rows = _with_bar(f"opening {directory}", work)
        print(f"{directory}: {before} bytes before, {after} after ({format_bytes(before)}, {format_bytes(after)}; "
              f"{_count(rows, 'row')} moved)")
    return EXIT_DONE


def inspect(args: argparse.Namespace) -> int:
    """Run ``store inspect``; returns the exit code."""
    if Path(args.where).is_file():
        from hpc_ctr.storage.describe import describe_segment

        told = describe_segment(args.where, max(0, args.rows))
        return _show(json.dumps(told, indent=1) if args.json else "\n".join(_segment_lines(told)))
    from hpc_ctr.storage.describe import describe_store

    stores, checkpoints = _targets(args.where)
    told = {"stores": [describe_store(directory) for directory in stores],
            "checkpoints": [_checkpoint(folder) for folder in checkpoints]}
    if args.json:
        return _show(json.dumps(told, indent=1))
    lines = [line for each in told["stores"] for line in _store_lines(each)]
    for each in told["checkpoints"]:
        lines.append(f"{each['folder']}: step {each['step']}, {_count(each['ranks'], 'rank')}, tables "
                     f"{', '.join(each['tables'])}, {_count(each['segments'], 'segment')}, {format_bytes(each['bytes'])}")
    return _show("\n".join(lines))


def _show(text: str) -> int:
    """Print, perhaps into a pager or ``head`` that has seen enough before the end; returns the exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail once more at its exit
    return EXIT_DONE


def _targets(where: str) -> tuple[list[str], list[Path]]:
    """Directories of stores and folders of checkpoints that ``where`` means. Raises UsageError when there is none."""
    from hpc_ctr.checkpoint.state import complete, find_all
    from hpc_ctr.storage.describe import stores_below

    folder = Path(where)
    if not folder.is_dir():
        kind = "is a file; hpc-ctr store inspect shows segment files" if folder.is_file() else "is not there"
        raise UsageError(f"store: {where} {kind}; give the directory of a store, a run or a checkpoint")
    stores = stores_below(where)
    checkpoints = complete(folder.parent) if folder.name == "pool" else find_all(folder)
    if not stores and not checkpoints:
        raise UsageError(f"store: there is no store (manifest.json) and no complete checkpoint (DONE) in {where}; give "
                         "the directory of a table, a rank, a run or a checkpoint")
    return stores, checkpoints


def _with_bar(text: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
    from hpc_ctr.train.progress import Bar

    with Bar(text) as bar:
        return work(bar.update)


def _checkpoint(folder: Path) -> dict[str, Any]:
    from hpc_ctr.checkpoint.state import read_manifest

    manifest = read_manifest(folder)
    names = {name for ranks in manifest.segments.values() for files in ranks for name in files}
    sizes = [os.path.getsize(path) for path in (folder.parent / "pool" / name for name in names) if path.is_file()]
    return {"folder": str(folder), "step": manifest.step, "ranks": manifest.ranks, "tables": list(manifest.segments),
            "segments": len(names), "bytes": sum(sizes)}


def _store_lines(told: dict[str, Any]) -> list[str]:
    lines = [f"{told['directory']}: table {told['table']!r}, rows of {told['width']} + {told['state']} {told['dtype']} "
             f"(x + state), {told['row_bytes']} bytes",
             f"  {_count(told['live'], 'live row')} of {told['rows']}, {told['stale_share']:.1%} stale, "
             f"{_count(len(told['segments']), 'segment')}, {format_bytes(told['disk_bytes'])} on disk, index at most "
             f"{format_bytes(told['index_bytes'])} in memory"]
    if told["columns"]:
        lines.append(f"  further columns: {', '.join(told['columns'])}; {_count(told['deletions'], 'deletion')}")
    for segment in told["segments"]:
        lines.append(f"  {segment['file']}  {segment['rows']:>12} rows  {segment['live']:>12} live  "
                     f"{segment['bytes']:>14} bytes{'  deletions' if segment['deletions'] else ''}")
    return lines


def _segment_lines(told: dict[str, Any]) -> list[str]:
    lines = [f"{told['path']}: {told['bytes']} bytes"]
    lines += [f"  {name}: {value}" for name, value in told["attributes"].items()]
    lines += [f"  dataset {name}: {what}" for name, what in told["datasets"].items()]
    for i, row in enumerate(told["first_rows"]):
        lines.append(f"  row {i}: " + "  ".join(f"{name} {_shown(value)}" for name, value in row.items()))
    return lines


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return " ".join(f"{each:.6g}" for each in value[:_WORDS_SHOWN]) + (" ..." if len(value) > _WORDS_SHOWN else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
