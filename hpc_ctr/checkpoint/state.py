"""What a checkpoint holds, and how it lies on disk.

    checkpoints/
      pool/<digest>.h5            segments of cold rows, by content: shared by all checkpoints
      step-000001000/
        rank-0000.npz ...         a rank's dense x, m, v, t, v-hat, generator, statistics (arrays only, no pickles)
        checkpoint.json           counters, cursor, and which segments hold the rows of which rank and table
        DONE                      written last; a folder without it is no checkpoint
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_ctr.errors import StorageError, UsageError

FORMAT = 1


@dataclass
class Manifest:
    """checkpoint.json. segments[table][rank] lists pool files, oldest first: a later one overrides an earlier."""

    step: int
    passes: int
    samples: int
    last_row_merge: int
    epoch: int
    order: Any
    ranks: int
    tables: list[dict[str, Any]]
    segments: dict[str, list[list[str]]]
    finished: bool
    seed: int
    format: int = FORMAT

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), indent=1)


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step``."""
    return root / f"step-{step:09d}"


def complete(root: Path) -> list[Path]:
    """Folders of the complete checkpoints below ``root``, oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if re.fullmatch(r"step-\d{9}", p.name) and (p / "DONE").is_file())


def find(where: str | Path) -> Path:
    """The checkpoint that ``where`` names: its folder, a checkpoints folder, or a run folder (the last complete one).

    Raises UsageError when there is none.
    """
    where = Path(where)
    if (where / "DONE").is_file() and (where / "checkpoint.json").is_file():
        return where
    for root in (where / "checkpoints", where):
        if found := complete(root):
            return found[-1]
    raise UsageError(f"checkpoint: there is no complete checkpoint in {where}; give a run folder, its checkpoints "
                     "folder, or one step-... folder that has a DONE file")


def read_manifest(folder: Path) -> Manifest:
    """checkpoint.json of a folder. Raises StorageError when it cannot be understood."""
    path = folder / "checkpoint.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree.get("format") != FORMAT:
            raise StorageError(f"{path}: format {tree.get('format')!r} is not known to this version (it reads {FORMAT})")
        return Manifest(**tree)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: cannot be read as a checkpoint ({error})") from error
