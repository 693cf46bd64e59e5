"""The run folder: config.yaml, metrics.jsonl, summary.json. Written by rank 0 alone."""

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hpc_ctr.errors import UsageError


class RunFolder:
    """The folder of one run, held from ``__init__`` to ``close``: no second run may write into it meanwhile.

    Nothing that an earlier run left is touched before ``clear`` and ``begin``, which come when the job is known to start.
    """

    def __init__(self, path: Path, overwrite: bool, continuing: bool):
        """Make the folder. Raises UsageError when it cannot be used, is in use, or holds a run and neither ``overwrite``
        nor ``continuing`` says what to do with it."""
        self.path = path
        self._overwrite = overwrite and not continuing
        if os.path.isfile(path):
            raise UsageError(f"run_dir: {path} is a file; name a folder")
        self._lock = FolderLock(path, "run_dir")
        try:
            self._check(continuing)
        except BaseException:
            self.close()
            raise

    def _check(self, continuing: bool) -> None:
        # a store alone is that of a start that failed
        if continuing or all(each.name == "store" for each in self._left()):
            return
        if not self._overwrite:
            raise UsageError(f"run_dir: {self.path} already holds a run; choose another folder, continue with --resume "
                             "auto, or replace it with --overwrite true")
        if not (self.path / "config.yaml").is_file():
            raise UsageError(f"run_dir: {self.path} is not empty and holds no run, so it is not overwritten; "
                             "choose another folder")

    def _left(self) -> list[Path]:
        """What others left here."""
        return [each for each in self.path.iterdir() if each.name != FolderLock.NAME]

    def clear(self) -> None:
        """Remove the run that is to be replaced, if there is one."""
        for each in self._left() if self._overwrite else []:
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()

    def begin(self, config: dict[str, Any]) -> None:
        """Write the resolved job into the folder."""
        _replace(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()


class FolderLock:
    """A folder is this process's alone until ``close`` or the process's end. ``setting`` is what named it."""

    NAME = "run.lock"

    def __init__(self, folder: Path, setting: str):
        """Make the folder if need be. Raises UsageError when it cannot be made or another process has it."""
        self._file = folder / self.NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"{setting}: {folder} cannot be used: {error.strerror or error}; name a folder where you "
                             "may write") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise UsageError(f"{setting}: another run that has not ended writes into {folder}; wait for it, end it, or "
                             "name another folder") from error
        except OSError:
            pass  # a file system without locks

    def close(self) -> None:
        """Give it back, without a trace."""
        self._file.unlink(missing_ok=True)
        os.close(self._descriptor)


def earlier_checkpoint_dir(path: Path) -> Path | None:
    """checkpoint.dir of the run that a folder holds, where its job named one."""
    try:
        tree = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        return Path(tree["checkpoint"]["dir"]).resolve() if tree["checkpoint"]["dir"] else None
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None


class MetricsLog:
    """metrics.jsonl: one JSON object a line; ``kind`` is train, pass, eval, lifecycle or checkpoint."""

    def __init__(self, path: Path, keep_to_step: int | None = None):
        """Open for appending. With ``keep_to_step`` (a resumed run) lines after that step are dropped first."""
        self._path = path
        kept: list[str] = []
        if keep_to_step is not None and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= keep_to_step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # the last line of a killed run may be cut short
        _replace(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a line and hand it to the system at once."""
        with _naming(self._path):
            self._file.write(json.dumps({"kind": kind, "step": step, **_clean(values)}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # every line was flushed; what a full disk refused has been told
            self._file.close()


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """summary.json, by rename."""
    _replace(path / "summary.json", json.dumps(_clean(summary), indent=1) + "\n")


def read_summary(path: Path) -> dict[str, Any]:
    """summary.json of a run folder. Raises UsageError when it is not there."""
    try:
        return json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} holds no summary.json that can be read ({error}); has the run ended?") from error


def _clean(value: Any) -> Any:
    """JSON has no NaN: such numbers become null."""
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with _naming(path):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A failed write does not say of which file: an OSError that leaves this block does."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def to_json(value: dict[str, Any]) -> str:
    """JSON for people; NaN becomes null."""
    return json.dumps(_clean(value), indent=1)


def write_json(path: str | Path, value: dict[str, Any]) -> None:
    """A JSON file, by rename; NaN becomes null."""
    _replace(Path(path), to_json(value) + "\n")
