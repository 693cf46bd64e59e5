"""Memory of this machine, and what a control group (Slurm, a container) leaves of it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Bytes: installed, available without swapping, and the limit of the control group (0: none)."""

    total: int
    available: int
    limit: int


def memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """What this process can use: the smaller of the machine's available memory and the room left in its control group."""
    info = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        info[name] = int(rest.split()[0]) * 1024
    available = info.get("MemAvailable", info.get("MemFree", 0))
    limit, room = _control_group(proc, groups, info["MemTotal"])
    return Memory(info["MemTotal"], min(available, room) if limit else available, limit)


def _control_group(proc: Path, groups: Path, installed: int) -> tuple[int, int]:
    """(limit, room left) of the tightest group around this process; (0, 0) when none limits it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return 0, 0
    best = (0, 0)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.strip("/")
        while folder == base or base in folder.parents:
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if 0 < limit < installed:
                room = max(limit - used + _field(folder / "memory.stat", names[2]), 0)
                if not best[0] or room < best[1]:
                    best = (limit, room)
            folder = folder.parent
    return best


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _field(path: Path, name: str) -> int:
    """One line of memory.stat: page cache that the kernel gives back counts as room."""
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0
