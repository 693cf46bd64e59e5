"""The only file operations of the stores.

Everything a store writes, renames, links, removes or reads goes through the functions of this module, so that
a test can fail, stop or record any of them. ``probe``, when set, is called with (operation, path) before each
one. ``recorder``, when set, is called with (operation, path, detail) after each one that changes what is on the
disk or makes it durable; from these calls alone the files can be made again:

    create               a new file, or an old one emptied
    write                detail: (offset, bytes)
    resize               detail: length
    sync, sync directory
    rename, link         path: the new name; detail: the old one
    remove               a file
    make directory, remove directory

Errors of the system become StorageError: one sentence with the path and what to do.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
from numba import carray, njit, types

from hpc_ctr.errors import StorageError
from hpc_ctr.kernels.memory import pointer

TEMPORARY = ".tmp"
DIRECT_BYTES = 4096  # transfers around the page cache begin and end at multiples of this, in the file and in memory
probe: Callable[[str, str], None] | None = None
recorder: Callable[[str, str, Any], None] | None = None

_COPY_BYTES = 8 << 20
_END_OF_FILE = -1
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.voidptr, types.uintp, types.int64))
_errno = types.ExternalFunction("__errno_location", types.voidptr())


def storage_error(error: OSError, action: str, path: str) -> StorageError:
    """What a user reads when ``action`` ("write", "read", ...) on ``path`` failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"no space left on the disk of {path}: free some, or point storage.dir (for a "
                            "checkpoint: its directory) at a larger disk")
    if error.errno == errno.EIO:
        return StorageError(f"the disk failed to {action} {path} (input/output error): check the disk, then "
                            "start from the last checkpoint on another one")
    if error.errno == errno.ENOENT:
        return StorageError(f"cannot {action} {path}: it is not there; was it removed by hand? Start from "
                            "the last checkpoint")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"cannot {action} {path}: {error.strerror}; make it writable or set storage.dir "
                            "to another directory")
    return StorageError(f"cannot {action} {path}: {error.strerror or error}")


@contextlib.contextmanager
def _operation(name: str, path: str) -> Iterator[None]:
    try:
        if probe is not None:
            probe(name, path)
        yield
    except OSError as error:
        raise storage_error(error, name, path) from error


def _record(operation: str, path: str, detail: Any = None) -> None:
    if recorder is not None:
        recorder(operation, path, detail)


def make_directory(path: str) -> None:
    """Create a directory and its parents, durably; it may exist."""
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        # who made it may have been killed before its name was on the disk; a parent that only others may read
        # is left to them
        with contextlib.suppress(StorageError):
            sync_directory(parent)
        return
    if not os.path.isdir(parent):
        make_directory(parent)
    with _operation("create", path), contextlib.suppress(FileExistsError):
        os.mkdir(path)
        _record("make directory", path)
    sync_directory(parent)


def list_directory(path: str) -> list[str]:
    """Names in a directory, sorted."""
    with _operation("list", path):
        return sorted(os.listdir(path))


def size(path: str) -> int:
    """Bytes of a file."""
    with _operation("inspect", path):
        return os.stat(path).st_size


def exists(path: str) -> bool:
    """Whether there is a file or directory of this name."""
    return os.path.exists(path)


def create(path: str) -> int:
    """Open a new, empty file for writing; a leftover of that name is overwritten. Returns the descriptor."""
    with _operation("create", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    _record("create", path)
    return descriptor


def write(descriptor: int, path: str, data, offset: int) -> None:
    """Write all of ``data`` at a byte offset."""
    with _operation("write", path):
        view, place = memoryview(data).cast("B"), offset
        while len(view):
            done = os.pwrite(descriptor, view, place)
            view, place = view[done:], place + done
    if recorder is not None:
        _record("write", path, (offset, bytes(data)))


def truncate(descriptor: int, path: str, length: int) -> None:
    """Set a file's length."""
    with _operation("resize", path):
        os.ftruncate(descriptor, length)
    _record("resize", path, length)


def sync(descriptor: int, path: str) -> None:
    """Wait until a file's contents are on the disk."""
    with _operation("sync", path):
        os.fsync(descriptor)
    _record("sync", path)


def sync_directory(path: str) -> None:
    """Wait until names created, renamed or removed in a directory are on the disk."""
    with _operation("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _record("sync directory", path)


def rename(source: str, target: str) -> None:
    """Rename within a file system, replacing ``target`` in one step."""
    with _operation("rename", target):
        os.replace(source, target)
    _record("rename", target, source)


def remove(path: str) -> None:
    """Remove a file; it may be gone already."""
    with _operation("remove", path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        _record("remove", path)


def remove_tree(path: str) -> None:
    """Remove a directory with all that is in it; it may be gone already."""
    if not os.path.isdir(path):
        return
    for name in list_directory(path):
        inner = os.path.join(path, name)
        if os.path.isdir(inner) and not os.path.islink(inner):
            remove_tree(inner)
        else:
            remove(inner)
    with _operation("remove", path):
        os.rmdir(path)
    _record("remove directory", path)


def remove_quietly(path: str) -> None:
    """Remove a file while an error is on its way: what cannot be removed is left to the next open."""
    with contextlib.suppress(StorageError):
        remove(path)


def link_or_copy(source: str, target: str) -> bool:
    """Give a file a second name, or copy it (and sync the copy) on another file system; True when it was
    linked."""
    if source == target:
        return True
    try:
        with _operation("link", target):
            try:
                os.link(source, target)
            except FileExistsError:
                os.unlink(target)
                _record("remove", target)
                os.link(source, target)
        _record("link", target, source)
        return True
    except StorageError as error:
        cause = error.__cause__
        if getattr(cause, "errno", None) not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP,
                                                 errno.EACCES, errno.ENOSYS):
            raise
    copy(source, target)
    return False


def copy(source: str, target: str) -> None:
    """Copy a file through a temporary name; the copy is on the disk when this returns."""
    temporary = target + TEMPORARY
    reader = open_read(source)
    try:
        writer = create(temporary)
        try:
            offset = 0
            while block := read(reader, source, offset, _COPY_BYTES):
                write(writer, temporary, block, offset)
                offset += len(block)
            sync(writer, temporary)
        finally:
            os.close(writer)
        rename(temporary, target)
    except StorageError:
        remove_quietly(temporary)
        raise
    finally:
        os.close(reader)


def write_file(path: str, data: bytes) -> None:
    """Write a small file under its temporary name and sync it; ``rename`` then puts it in place."""
    descriptor = create(path)
    try:
        write(descriptor, path, data, 0)
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def read_file(path: str) -> bytes:
    """All bytes of a file."""
    with _operation("read", path), open(path, "rb") as file:
        return file.read()


def open_hdf5(path: str) -> h5py.File:
    """An HDF5 file, to read its description with h5py, whose errors are left to the caller."""
    with _operation("open", path):
        pass
    return h5py.File(path, "r", locking=False)


def open_read(path: str) -> int:
    """Open for reading; returns the descriptor."""
    with _operation("open", path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def open_direct_write(path: str) -> int:
    """Open an existing file for writes around the page cache, -1 where the file system has none. Offset, length and
    address of a write are multiples of DIRECT_BYTES."""
    with _operation("open", path):
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return -1
            raise


def open_direct(path: str) -> int:
    """Open for reads around the page cache, -1 where the file system has none; ``read_range`` says how to read."""
    with _operation("open", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return -1
            raise
    with mmap.mmap(-1, DIRECT_BYTES) as page:
        try:
            os.preadv(descriptor, [page], 0)
        except OSError:  # some file systems take the flag and then refuse to read, or want larger blocks
            os.close(descriptor)
            return -1
    return descriptor


def close(descriptor: int) -> None:
    """Close a descriptor of this module."""
    os.close(descriptor)


def read(descriptor: int, path: str, offset: int, length: int) -> bytes:
    """Up to ``length`` bytes at an offset."""
    with _operation("read", path):
        return os.pread(descriptor, length, offset)


@njit(nogil=True, cache=True)
def read_range(descriptor, offset, needed, wanted, address):
    """Read at least ``needed`` and at most ``wanted`` bytes at a byte offset to a memory address, for kernels.

    Returns 0, or the system's error number, or -1 where the file ends before that. On a descriptor of ``open_direct``
    offset, wanted and address are multiples of DIRECT_BYTES.
    """
    done = np.int64(0)
    while done < needed:
        n = _pread(np.int32(descriptor), pointer(address + np.uint64(done)), np.uint64(wanted - done),
                   np.int64(offset + done))
        if n > 0:
            done += n
            continue
        code = np.int64(_END_OF_FILE) if n == 0 else np.int64(carray(_errno(), 1, np.int32)[0])
        if code != 4:  # EINTR: a signal came, try again
            return code
    return np.int64(0)


@njit(nogil=True, cache=True)
def _read_all(descriptors, offsets, lengths, starts, buffer):
    base = np.uint64(buffer.ctypes.data)
    for i in range(len(descriptors)):
        code = read_range(descriptors[i], offsets[i], lengths[i], lengths[i], base + np.uint64(starts[i]))
        if code != 0:
            return i, code
    return -1, np.int64(0)


def read_many(descriptors: np.ndarray, paths: list[str], which: np.ndarray, offsets: np.ndarray,
              lengths: np.ndarray, starts: np.ndarray, buffer: np.ndarray) -> None:
    """Read many byte ranges into one buffer, without Python per range.

    Range i: ``lengths[i]`` bytes at ``offsets[i]`` of file ``which[i]`` (an index into ``descriptors`` int64
    and ``paths``) go to ``buffer[starts[i]:]``; offsets, lengths, starts: int64 [n]; buffer: uint8,
    C-contiguous.
    """
    if len(which) == 0:
        return
    if int((starts + lengths).max()) > buffer.nbytes:
        raise ValueError("the buffer is too small for the ranges")
    with _operation("read", paths[int(which[0])]):
        failed, code = _read_all(descriptors[which], offsets, lengths, starts, buffer)
    if failed >= 0:
        raise read_failed(paths[int(which[failed])], int(code))


def read_failed(path: str, code: int) -> StorageError:
    """The error for a code of ``read_range``."""
    if code == _END_OF_FILE:
        return StorageError(f"{path} is shorter than its rows: it was truncated; start from the last checkpoint")
    return storage_error(OSError(code, os.strerror(code)), "read", path)


def reading(path: str) -> contextlib.AbstractContextManager[None]:
    """Around reads by kernels that call ``read_range``: the probe sees one operation."""
    return _operation("read", path)


def lock(path: str) -> int:
    """Take a lock file for this process; StorageError when another holds it. Returns the descriptor."""
    descriptor = create(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StorageError(f"the store {os.path.dirname(path)} is open already, here or in another process: "
                           "close it, or give each run its own storage.dir") from error
    except OSError:
        pass  # a file system without locks: nothing to hold on to
    return descriptor


def free_bytes(path: str) -> int:
    """Free bytes on the disk of ``path``."""
    with _operation("inspect", path):
        return shutil.disk_usage(path).free


class Hdf5Capture:
    """What h5py writes into a new file (its ``fileobj`` driver), kept in memory: the description of a file whose data
    are written around the HDF5 library."""

    def __init__(self):
        self._written: list[tuple[int, bytes]] = []
        self._position = self._length = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, length: int = -1) -> bytes:
        begin = self._position
        end = self._length if length < 0 else begin + length
        data = bytearray(end - begin)
        for at, part in self._written:
            first, last = max(at, begin), min(at + len(part), end)
            if first < last:
                data[first - begin:last - begin] = part[first - at:last - at]
        self._position = end
        return bytes(data)

    def readinto(self, target) -> int:
        target[:] = self.read(len(target))
        return len(target)

    def write(self, data) -> int:
        self._written.append((self._position, bytes(data)))
        self._position += len(data)
        self._length = max(self._length, self._position)
        return len(data)

    def truncate(self, length: int | None = None) -> int:
        self._length = self._position if length is None else length
        return self._length

    def flush(self) -> None:
        pass

    def hdf5(self) -> h5py.File:
        """The file, open for writing; close it before ``read``. Rows begin at multiples of 4096 bytes."""
        return h5py.File(self, "w", libver=("v110", "v110"), alignment_threshold=4096,
                         alignment_interval=4096)
