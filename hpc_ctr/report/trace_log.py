"""Every exchange of a rank as a line of JSON, in <run_dir>/trace/rank-NNNN.jsonl."""

import json
from dataclasses import asdict
from pathlib import Path

from hpc_ctr.comm.trace import Exchange


class TraceLog:
    """The file of one rank; lines are appended pass by pass, so that memory holds those of one pass alone.

    A run that is continued appends to what it wrote before, the exchanges of steps that it repeats included.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Make the folder and open the file. Raises OSError."""
        folder = run_dir / "trace"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{rank:04d}.jsonl").open("a", encoding="utf-8")

    def write(self, exchanges: list[Exchange]) -> None:
        """Append the exchanges and empty the list. Raises OSError."""
        for exchange in exchanges:
            self._file.write(json.dumps(asdict(exchange)) + "\n")
        self._file.flush()
        exchanges.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
