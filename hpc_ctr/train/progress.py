"""What people see while a job trains: a live line on a terminal, a line a pass elsewhere. Rank 0 only."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from hpc_ctr.units import format_bytes

_BAR_AFTER = 1.0  # seconds


class ProgressLine:
    """One line: step, samples/s, loss, AUC, tier hits, share of time in merges."""

    def __init__(self, active: bool, stream: Any = None):
        self._console = Console(file=stream or sys.stderr, highlight=False) if active else None
        self._live: Live | None = None
        self._facts = ""
        self._last = 0.0

    def __enter__(self) -> "ProgressLine":
        if self._console is not None and self._console.is_terminal:
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exc)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._console is not None:
            self._console.print(text, soft_wrap=True)

    def opening(self, done: int, total: int) -> None:
        """Called while the tiers read their files: bytes done and in all."""
        now = time.monotonic()
        if self._live is not None and now - self._last > 0.25:
            self._last = now
            self._live.update(Text(f"reading rows: {format_bytes(done)} of {format_bytes(total)}"))

    def step(self, step: int, loss: float) -> None:
        """Called after every step; draws at most four times a second."""
        now = time.monotonic()
        if self._live is not None and now - self._last > 0.25:
            self._last = now
            self._live.update(Text(f"step {step:,}  loss {loss:.4f}  {self._facts}"))

    def end_of_pass(self, step: int, samples_per_s: float, loss: float, auc: float, hit_share: float,
                    merge_share: float) -> None:
        """Facts of the pass that just ended."""
        self._facts = (f"{samples_per_s:,.0f} samples/s  AUC {auc:.4f}  host hits {hit_share:.1%}  "
                       f"merges {merge_share:.1%}")
        if self._console is not None and self._live is None:
            self.say(f"step {step:,}  loss {loss:.4f}  {self._facts}")


class Bar:
    """A bar for something that takes its time, such as opening the tiers; only on a terminal, and only after a second.

    ``update(done, total)`` is what a store calls while it works; the numbers are bytes.
    """

    def __init__(self, text: str, active: bool = True, stream: Any = None):
        console = Console(file=stream or sys.stderr)
        self._progress: Progress | None = None
        if active and console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn()
            self._progress = Progress(*columns, console=console, transient=True)
        self._text = text
        self._task: TaskID | None = None
        self._began = time.monotonic()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._task is not None:
            self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """So many bytes of so many are done."""
        if self._progress is None:
            return
        if self._task is None and time.monotonic() - self._began > _BAR_AFTER:
            self._task = self._progress.add_task(self._text)
            self._progress.start()
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)
