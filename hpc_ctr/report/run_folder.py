"""The run folder: config.yaml, metrics.jsonl, summary.json. Written by rank 0 alone."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from hpc_ctr.errors import UsageError


def create(path: Path, config: dict[str, Any], overwrite: bool, resuming: bool) -> None:
    """Make the folder and write the resolved job into it.

    Raises UsageError when a run is there already and neither ``overwrite`` nor ``resuming`` says what to do with it.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"run_dir: {path} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()) and not resuming:
        if not overwrite:
            raise UsageError(f"run_dir: {path} already holds a run; choose another folder, continue with --resume auto, "
                             "or replace it with --overwrite true")
        if not (path / "config.yaml").is_file():
            raise UsageError(f"run_dir: {path} is not empty and holds no run, so it is not overwritten; "
                             "choose another folder")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / "config.yaml", yaml.safe_dump(config, sort_keys=False))


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
        self._file.write(json.dumps({"kind": kind, "step": step, **_clean(values)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
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
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_json(path: str | Path, value: dict[str, Any]) -> None:
    """A JSON file, by rename; NaN becomes null."""
    _replace(Path(path), json.dumps(_clean(value), indent=1) + "\n")
