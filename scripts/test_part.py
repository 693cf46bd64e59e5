"""One part of the test suite on one rank, and the sums over ranks and parts. Called by test.sh.

    test_part.py OUT NAME MARKS [pytest arguments]   run the tests that MARKS selects (also under mpirun)
    test_part.py --close OUT NAME RANKS EXIT         after a part: one outcome a test over all ranks, reasons of failures
    test_part.py --total OUT                         the closing line over all parts
"""

import os
import sys
from pathlib import Path

ORDER = {"skipped": 0, "passed": 1, "failed": 2}  # the worst over phases and ranks counts
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class Recorder:
    """A pytest plugin that writes each outcome at once, so that a rank that dies leaves what it knew."""

    def __init__(self, path: Path):
        self.file = open(path, "w", encoding="utf-8", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write(f"started\t{nodeid}\n")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.file.write(f"ended\t{nodeid}\n")

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.file.write(f"{report.outcome}\t{report.nodeid}\n")

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.file.write(f"failed\t{report.nodeid}\n")

    def pytest_sessionfinish(self) -> None:
        self.file.write("complete\t\n")


def with_marks(marks: str, arguments: list[str]) -> list[str]:
    """pytest's arguments with ``marks``; a -m among them narrows it and does not replace it."""
    rest, own = [], []
    words = iter(arguments)
    for word in words:
        if word == "-m":
            own.append(next(words, ""))
        elif word.startswith("-m") and not word.startswith("--"):
            own.append(word[2:].lstrip("="))
        else:
            rest.append(word)
    return ["-m", " and ".join(f"({each})" for each in [marks, *own] if each)] + rest


def run(out: Path, name: str, marks: str, arguments: list[str]) -> int:
    """Run this rank's pytest. Rank 0 prints; the others write to files."""
    rank = next((int(os.environ[key]) for key in RANK_NAMES if key in os.environ), 0)
    if rank:
        log = os.open(out / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
    import pytest

    limit = os.environ.get("HPC_CTR_TEST_TIMEOUT", "180")
    # under MPI a test that hangs may sit in the library, where no signal reaches Python: end the rank, and so the job
    method = "thread" if "OMPI_COMM_WORLD_SIZE" in os.environ else "signal"
    code = pytest.main(["-q", f"--timeout={limit}", f"--timeout-method={method}", "-p", "no:cacheprovider",
                        *with_marks(marks, arguments)], [Recorder(out / f"{name}.{rank}.outcomes")])
    # The outcomes tell of failed tests. An exit code would make mpirun kill the ranks that still report theirs.
    told = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    return 0 if code in told else int(code)


def read(path: Path) -> tuple[dict[str, str], str, bool]:
    """Outcome by test, the test that was running at the end, and whether pytest came to its end."""
    outcomes: dict[str, str] = {}
    running, complete = "", False
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        what, _, test = line.partition("\t")
        if what == "started":
            running = test
        elif what == "ended":
            running = ""
        elif what == "complete":
            complete = True
        elif ORDER[what] >= ORDER.get(outcomes.get(test, ""), -1):
            outcomes[test] = what
    return outcomes, running, complete


def close(out: Path, name: str, ranks: int, code: int) -> bool:
    """Merge the ranks of a part into NAME.result and say what went wrong. True when all is well."""
    merged: dict[str, str] = {}
    notes, unfinished = [], []
    for rank in range(ranks):
        outcomes, running, complete = read(out / f"{name}.{rank}.outcomes")
        for test, outcome in outcomes.items():
            if ORDER[outcome] >= ORDER.get(merged.get(test, ""), -1):
                merged[test] = outcome
        if not complete:
            unfinished.append(rank)
            if running:
                merged[running] = "failed"
                notes.append(f"rank {rank} ended in {running}")
        if rank and ("failed" in outcomes.values() or not complete):
            log = out / f"{name}.{rank}.log"
            if log.exists():
                notes.append(f"--- rank {rank} wrote\n" + log.read_text(errors="replace")[-6000:])
    if (code or unfinished) and "failed" not in merged.values():
        merged[f"{name} (exit code {code})"] = "failed"
        notes.append(f"the part {name} ended with exit code {code}" +
                     (" after its time limit" if code in (124, 137) else ""))
    for note in notes:
        print(note)
    (out / f"{name}.result").write_text("".join(f"{what}\t{test}\n" for test, what in merged.items()))
    failed = [test for test, what in merged.items() if what == "failed"]
    for test in failed:
        print(f"FAILED in part {name}: {test}")
    return not failed


def total(out: Path) -> bool:
    """Print the closing line. True when something ran and nothing failed."""
    count = dict.fromkeys(ORDER, 0)
    for path in out.glob("*.result"):
        for line in path.read_text().splitlines():
            count[line.partition("\t")[0]] += 1
    if not count["passed"] + count["failed"]:
        print("no test ran: nothing matches the arguments")
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped", flush=True)
    return count["passed"] > 0 and not count["failed"]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--close", out, name, ranks, code]:
            sys.exit(not close(Path(out), name, int(ranks), int(code)))
        case ["--total", out]:
            sys.exit(not total(Path(out)))
        case [out, name, marks, *arguments]:
            sys.exit(run(Path(out), name, marks, arguments))
