"""A room imports only from rooms below it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hpc_ctr"
ROOMS = ["errors", "units", "kernels", "comm", "cluster", "data", "storage", "embedding", "exchange", "models", "optim",
         "metrics", "checkpoint", "train", "report", "bench", "config", "api", "cli"]
# The command line puts everything together and benchmarks run whole jobs; config composes the options of all rooms.
ABOVE_ALL = {"bench"}


def imports_of(path: Path) -> set[str]:
    """Rooms of this package that a file imports, at whatever depth of the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "hpc_ctr":
                names = [f"hpc_ctr.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("hpc_ctr.") and name != "hpc_ctr.__version__"}
    return found


def files() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in ROOMS, f"{room} is not in the list of rooms (docs/architecture.md)"
    if room in ABOVE_ALL:
        return
    limit = ROOMS.index(room)
    above = {other for other in imports_of(path) if other != room and ROOMS.index(other) > limit}
    assert not above, f"{path.relative_to(PACKAGE)} imports {sorted(above)}, which lie above {room}"


def test_report_needs_no_torch() -> None:
    for path in (PACKAGE / "report").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "import torch" not in source and "from torch" not in source, path
