"""Facts about the machine as one rank sees it: CPUs, NUMA nodes, memory, disks. Reads /sys and /proc, changes nothing."""

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

SYS_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Disk:
    """The file system below a path: where it is mounted, its type, bytes in all and free."""

    mount: str
    kind: str
    total: int
    free: int


@dataclass(frozen=True)
class Host:
    """One rank's place: host name, CPUs it may run on, NUMA nodes of those, threads set by the environment."""

    name: str
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    omp_threads: int
    memory_total: int
    memory_available: int


def parse_cpu_list(text: str) -> set[int]:
    """``0-3,8,10-11`` as the kernel writes it."""
    out: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            out |= set(range(int(first), int(last or first) + 1))
    return out


def format_cpu_list(cpus: tuple[int, ...]) -> str:
    """The reverse of ``parse_cpu_list``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def numa_cpus(root: Path = SYS_NODES) -> dict[int, set[int]]:
    """CPUs by NUMA node; {0: all} where the kernel shows no nodes."""
    out = {}
    for folder in sorted(root.glob("node[0-9]*")):
        try:
            out[int(folder.name[4:])] = parse_cpu_list((folder / "cpulist").read_text())
        except OSError:
            continue
    return out or {0: set(range(os.cpu_count() or 1))}


def this_host(root: Path = SYS_NODES) -> Host:
    """The facts about this process."""
    cpus = os.sched_getaffinity(0)
    nodes = tuple(node for node, has in sorted(numa_cpus(root).items()) if has & cpus)
    memory = psutil.virtual_memory()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Host(socket.gethostname(), tuple(sorted(cpus)), nodes, int(threads) if threads.isdigit() else 0, memory.total,
                memory.available)


def disk_of(path: str | Path, mounts: str = "/proc/self/mounts") -> Disk:
    """The disk that ``path`` (which need not exist yet) would lie on."""
    place = existing_parent(Path(path))
    best = ("/", "unknown")
    try:
        for line in Path(mounts).read_text().splitlines():
            _, mount, kind, *_ = line.split()
            mount = mount.replace("\\040", " ")
            inside = place == Path(mount) or Path(mount) in place.parents
            if inside and len(mount) >= len(best[0]):
                best = (mount, kind)
    except OSError:
        pass
    usage = shutil.disk_usage(place)
    return Disk(best[0], best[1], usage.total, usage.free)


def existing_parent(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.resolve()
