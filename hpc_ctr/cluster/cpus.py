"""CPUs and NUMA nodes of this process, as the kernel tells them."""

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of a kernel list such as "0-3,8,10-11", ascending. Raises ValueError when it is none."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return sorted(cpus)


def format_cpu_list(cpus: list[int]) -> str:
    """The inverse of parse_cpu_list: [0, 1, 2, 8] as "0-2,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def affinity() -> list[int]:
    """CPUs on which this process may run, ascending."""
    return sorted(os.sched_getaffinity(0))


def numa_nodes(root: Path = NODES) -> dict[int, list[int]]:
    """CPUs of every NUMA node that has any. A kernel without NUMA gives one node 0 with all CPUs of this machine."""
    nodes = {}
    for folder in sorted(root.glob("node[0-9]*")):
        try:
            cpus = parse_cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            nodes[int(folder.name[4:])] = cpus
    return nodes or {0: list(range(os.cpu_count() or 1))}


def nodes_of(cpus: list[int], nodes: dict[int, list[int]]) -> list[int]:
    """NUMA nodes that have at least one of ``cpus``, ascending."""
    mine = set(cpus)
    return sorted(node for node, its in nodes.items() if mine & set(its))


def numa_domain() -> int | None:
    """The NUMA node that all CPUs of this process are on; None where it may run on several."""
    nodes = nodes_of(affinity(), numa_nodes())
    return nodes[0] if len(nodes) == 1 else None


def thread_count(environ: dict[str, str] | os._Environ = os.environ) -> int:
    """Threads that OpenMP code (torch, BLAS) starts in this process: OMP_NUM_THREADS, else one a CPU it may use."""
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else len(affinity())
