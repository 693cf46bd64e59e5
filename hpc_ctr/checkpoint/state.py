"""What a checkpoint holds, and how it lies on disk.

    checkpoints/
      pool/<digest>.h5            segments of cold rows, by content: shared by all checkpoints
      step-000001000/
        rank-0000.npz ...         a rank's dense x, m, v, t, v-hat, generator, statistics, show counters (arrays alone)
        checkpoint.json           counters, cursor, and which segments hold the rows of which rank and table
        DONE                      written last; a folder without it is no checkpoint
      step-000001000.old/         while a step is saved again: the former one, which counts until the new one is done
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import yaml

from hpc_ctr.errors import StorageError, UsageError

FORMAT = 1
DONE = "DONE"
FORMER = ".old"


@dataclass
class Manifest:
    """checkpoint.json. segments[table][rank] lists pool files, oldest first: a later one overrides an earlier.
    workers[rank] is the dense worker that a rank was part of; empty where every rank was one."""

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
    bytes: dict[str, dict[str, int]]
    tiers: dict[str, int]
    format: int = FORMAT
    workers: list[int] = field(default_factory=list)
    exchanges: dict[str, dict[str, float]] = field(default_factory=dict)

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
    names = {p.name for p in root.iterdir() if re.fullmatch(r"step-\d{9}(\.old)?", p.name) and (p / DONE).is_file()}
    return sorted(root / name for name in names if name.removesuffix(FORMER) not in names - {name})


def find(where: str | Path) -> Path:
    """The checkpoint that ``where`` names: its folder, a checkpoints folder, or a run folder (the last complete one).

    Raises UsageError when there is none.
    """
    if found := find_all(where):
        return found[-1]
    raise UsageError(f"checkpoint: there is no complete checkpoint in {where}; give a run folder, its checkpoints "
                     "folder, or one step-... folder that has a DONE file")


def find_all(where: str | Path) -> list[Path]:
    """All complete checkpoints that ``where`` names, in the same way, oldest first; they are of one root."""
    where = Path(where)
    if (where / DONE).is_file() and (where / "checkpoint.json").is_file():
        return [where]
    for root in (*_checkpoint_dir(where), where / "checkpoints", where):
        if found := complete(root):
            return found
    return []


def read_manifest(folder: Path) -> Manifest:
    """checkpoint.json of a folder. Raises StorageError when it cannot be understood."""
    path = folder / "checkpoint.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree.get("format") != FORMAT:
            raise StorageError(f"{path}: format {tree.get('format')!r} is not known to this version, "
                               f"which reads {FORMAT}")
        manifest = Manifest(**tree)
        _check_entries(manifest)
        return manifest
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: cannot be read as a checkpoint ({error}); {_remedy(folder)}") from error


def read_arrays(folder: Path, rank: int) -> dict[str, np.ndarray]:
    """One rank's arrays. Nothing in the file can run code: only plain arrays are accepted."""
    path = folder / f"rank-{rank:04d}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        # numpy's own words for this would have the user load anything at all
        why = "it holds more than plain arrays" if "pickle" in str(error) else error
        raise StorageError(f"{path}: cannot be read ({why}): the checkpoint is damaged; {_remedy(folder)}") from error


def _remedy(folder: Path) -> str:
    """What to do instead of reading a damaged checkpoint."""
    earlier = [other for other in complete(folder.parent) if other.name < folder.name]
    return f"an earlier one is complete: --resume {earlier[-1]}" if earlier else "there is no earlier one beside it"


def _check_entries(manifest: Manifest) -> None:
    """Raises ValueError for an entry that cannot be what ``save`` wrote, so that nobody stumbles over it later."""
    counters = [getattr(manifest, name) for name in ("step", "passes", "samples", "last_row_merge", "epoch", "ranks")]
    if not all(isinstance(count, int) and count >= 0 for count in counters):
        raise ValueError("a counter is not a whole number of at least 0")
    mappings = manifest.order, manifest.segments, manifest.bytes, manifest.tiers, manifest.exchanges
    if not all(isinstance(each, dict) for each in mappings):
        raise ValueError("order, segments, bytes, tiers and exchanges must be mappings")
    if not isinstance(manifest.tables, list) or not all(isinstance(table, dict) for table in manifest.tables):
        raise ValueError("tables must be a list of mappings")
    for table in manifest.tables:
        ranks = manifest.segments.get(table.get("name"))
        if not isinstance(ranks, list) or len(ranks) != manifest.ranks:
            raise ValueError(f"the segments of table {table.get('name')!r} are not those of {manifest.ranks} ranks")
        if not all(isinstance(files, list) and all(isinstance(file, str) for file in files) for files in ranks):
            raise ValueError(f"the segments of table {table.get('name')!r} are not names of files")


def _checkpoint_dir(run: Path) -> list[Path]:
    """Where the run of a run folder keeps its checkpoints, if its job says so: none or one folder."""
    try:
        tree = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        return [Path(tree["checkpoint"]["dir"])] if tree["checkpoint"]["dir"] else []
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return []
