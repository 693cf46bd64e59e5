"""The page cache, which must not serve what is measured as the disk's."""

import ctypes
import mmap
import os
from collections.abc import Iterable

import numpy as np


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Write the files out and give their pages back to the system. Pages that a process has mapped stay."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # a compaction in the background has removed it
            continue
        try:
            os.fsync(descriptor)  # changed pages stay, whatever is asked for
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(path: str | os.PathLike[str]) -> int:
    """Bytes of a file that the page cache holds now. Raises OSError."""
    size = os.path.getsize(path)
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as pages:
        view = np.frombuffer(pages, np.uint8)
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        failed = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size),
                              ctypes.c_void_p(flags.ctypes.data))
        del view  # a map with a view on it cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore fails on {path}")
    return int((flags & 1).sum()) * mmap.PAGESIZE


def resident_share(paths: Iterable[str | os.PathLike[str]]) -> float:
    """Share of the files' bytes that the page cache holds now."""
    paths = [path for path in paths if os.path.exists(path)]
    total = sum(os.path.getsize(path) for path in paths)
    return min(1.0, sum(resident(path) for path in paths) / total) if total else 0.0


def bytes_written() -> int | None:
    """Bytes that this process has caused to be written to disks so far, all threads; None where nobody counts."""
    return _io("write_bytes")


def bytes_read() -> int | None:
    """Bytes that disks had to deliver to this process so far; what came from the page cache is not among them."""
    return _io("read_bytes")


def _io(name: str) -> int | None:
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(f"{name}:")), None)
    except OSError:
        return None
