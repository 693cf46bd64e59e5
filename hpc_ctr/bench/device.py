"""What the disk itself gives, measured without any store: the limit that a store of small rows is compared with."""

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numba import njit, types

from hpc_ctr.errors import UsageError
from hpc_ctr.kernels.memory import pointer

PAGE = 4096
DEPTH = 32  # reads under way at once
_CHUNK = 8 << 20
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.voidptr, types.uintp, types.int64))


@njit(nogil=True, cache=True)
def _read_pages(descriptor, pages, address):
    """Read pages of 4 KiB one after the other to one address; returns how many could be read."""
    for i in range(len(pages)):
        done = _pread(np.int32(descriptor), pointer(address), np.uint64(PAGE), np.int64(pages[i]) * np.int64(PAGE))
        if done != PAGE:
            return i
    return len(pages)


def open_direct(path: Path) -> int:
    """A descriptor for reads around the page cache. Raises UsageError where the file system has none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(descriptor, [page], 0)
        return descriptor
    except OSError as error:
        raise UsageError(f"--dir: the file system of {path.parent} has no reads around the page cache "
                         f"({error.strerror}); choose a folder on a local disk") from error


def no_direct_reads(folder: Path) -> str:
    """Why files in a folder cannot be read around the page cache; "" when they can."""
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(bytes(PAGE))
        probe.flush()
        try:
            os.close(open_direct(Path(probe.name)))
        except UsageError as error:
            return str(error)
    return ""


def write_file(path: Path, nbytes: int) -> float:
    """Write so many bytes (to whole pages) in order, and wait for the disk; returns bytes/s."""
    chunk = np.random.default_rng(0).integers(0, 256, _CHUNK, np.uint8)
    nbytes = -(-nbytes // PAGE) * PAGE
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for at in range(0, nbytes, _CHUNK):
            file.write(memoryview(chunk)[:min(_CHUNK, nbytes - at)])
        os.fsync(file.fileno())
    return nbytes / (time.perf_counter() - begin)


class RandomReads:
    """Reads of 4 KiB at random places of a file by threads that numba runs without Python's lock; a context manager."""

    def __init__(self, path: Path, depth: int = DEPTH):
        self.path, self.depth = path, depth
        self.descriptor = open_direct(path)
        self.pages = os.path.getsize(path) // PAGE
        self._buffers = [mmap.mmap(-1, PAGE) for _ in range(depth)]  # a page each, at the address of a page
        self._addresses = [np.uint64(np.frombuffer(buffer, np.uint8).ctypes.data) for buffer in self._buffers]
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="hpc_ctr-device")
        self.run(depth, 0)  # compiles, and starts the threads

    def run(self, reads: int, seed: int) -> float:
        """Reads/s of so many reads. Raises UsageError when one fails."""
        pages = np.random.default_rng(seed).integers(0, self.pages, reads)
        parts = np.array_split(pages, self.depth)
        begin = time.perf_counter()
        done = sum(self._pool.map(_read_pages, [self.descriptor] * self.depth, parts, self._addresses))
        seconds = time.perf_counter() - begin
        if done != reads:
            raise UsageError(f"--dir: a read of {self.path} failed; check the disk")
        return reads / seconds

    def close(self) -> None:
        """End the threads and close the file."""
        self._pool.shutdown()
        os.close(self.descriptor)

    def __enter__(self) -> "RandomReads":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def reads_per_second(folder: Path, nbytes: int, runs: int, reads: int = 100_000) -> list[float]:
    """4 KiB reads/s at depth 32 from a file of ``nbytes`` that is made in ``folder`` and removed again."""
    path = folder / "device.bin"
    try:
        write_file(path, nbytes)
        with RandomReads(path) as device:
            return [device.run(reads, seed) for seed in range(1, runs + 1)]
    finally:
        path.unlink(missing_ok=True)
