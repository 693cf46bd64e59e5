"""Files as one global sequence of blocks: byte ranges of plain files cut at line ends, and whole .gz files.

Block i of a plain file holds the lines whose first byte lies in its range, so that cutting needs no look at the data
and does not depend on the number of ranks; a block may be empty.
"""

import glob
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_ctr.errors import DataError, UsageError
from hpc_ctr.kernels.parse import count_byte
from hpc_ctr.units import parse_bytes

MAX_TEXT = 1 << 30                  # bytes in one piece: cell offsets are 32-bit
_STEP = 1 << 16
_SCAN = 1 << 22


@dataclass(frozen=True)
class DataFile:
    """path; size in bytes as stored; begin: where the rows begin (after a header); first_line: the number, from 1, of
    the line there."""

    path: str
    size: int
    begin: int = 0
    first_line: int = 1

    @property
    def packed(self) -> bool:
        """Whether it is a .gz file."""
        return self.path.endswith(".gz")


@dataclass(frozen=True)
class Block:
    """The lines of ``file`` whose first byte lies in [start, stop); of a .gz file all lines."""

    file: DataFile
    start: int
    stop: int

    def first_line(self, line_start: int) -> int:
        """Number, from 1 in the file, of the line that begins at byte ``line_start``: counts the lines before."""
        lines, at = 0, self.file.begin
        with open(self.file.path, "rb") as file:
            file.seek(at)
            while at < line_start:
                data = file.read(min(_SCAN, line_start - at))
                if not data:
                    break
                lines += count_byte(np.frombuffer(data, np.uint8), 10)
                at += len(data)
        return self.file.first_line + lines


@dataclass(frozen=True)
class Text:
    """Some consecutive whole lines of a block. buf: uint8. last: no more of the block follows."""

    buf: np.ndarray
    first_line: Callable[[], int]
    last: bool


def find_files(patterns: Sequence[str], setting: str, base_dir: str = "") -> list[str]:
    """Paths that the names and patterns stand for, in their order, each pattern sorted.

    What is not found from the working directory is looked up below ``base_dir``. Raises UsageError.
    """
    paths: list[str] = []
    known: set[str] = set()
    for pattern in patterns:
        places = [os.path.expanduser(pattern)]
        if base_dir and not os.path.isabs(places[0]):
            places.append(os.path.join(base_dir, places[0]))
        found = next(filter(None, map(_matches, places)), [])
        if not found:
            what = "no file matches" if glob.has_magic(pattern) else "there is no file"
            raise UsageError(f"{setting}: {what} {' or '.join(map(repr, places))}")
        for path in found:
            if os.path.isdir(path):
                raise UsageError(f"{setting}: {path!r} is not a file; name the files, for example {path}/*.tsv")
            if not os.path.isfile(path):
                raise UsageError(f"{setting}: {path!r} is not a regular file, and files are read more than once; give "
                                 "the path of one on a disk")
            if os.path.realpath(path) in known:
                raise UsageError(f"{setting}: {path!r} is named twice, and its rows would be read twice")
            paths.append(path)
            known.add(os.path.realpath(path))
    return paths


def find_file(pattern: str, setting: str, base_dir: str = "") -> str:
    """As ``find_files``, for a setting that names one file. Raises UsageError."""
    found = find_files([pattern], setting, base_dir)
    if len(found) > 1:
        raise UsageError(f"{setting}: {pattern!r} matches {len(found)} files, {found[0]} and {found[1]} among them; name "
                         "one")
    return found[0]


def _matches(pattern: str) -> list[str]:
    return [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))


def open_text(path: str):
    """The file opened for reading bytes, unpacked when it ends in .gz. Raises UsageError when it cannot be opened."""
    try:
        return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")
    except OSError as error:
        raise UsageError(f"data.files: {path!r} cannot be read: {error.strerror or error}") from error


def top_lines(path: str, n: int) -> list[bytes]:
    """Up to ``n`` first lines, with their line ends. Raises UsageError or DataError."""
    with open_text(path) as file:
        lines = [_guarded(path, lambda: file.readline(1 << 24)) for _ in range(n)]
    return [line for line in lines if line]


def _guarded(path: str, read: Callable):
    try:
        return read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut off: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def block_size(option: int | str, total: int) -> int:
    """Bytes of a block: the option, or for "auto" total/256 within 64 KiB and 16 MiB."""
    if option == "auto":
        return min(max(total // 256, 1 << 16), 1 << 24)
    return parse_bytes(option, "data.block_bytes")


def cut(files: Sequence[DataFile], size: int) -> list[Block]:
    """The global sequence of blocks of about ``size`` bytes."""
    blocks = []
    for file in files:
        step = file.size if file.packed else size
        blocks += [Block(file, at, min(at + step, file.size)) for at in range(0, file.size, max(step, 1))
                   if file.packed or at + step > file.begin]
    return blocks


def read(block: Block, size: int) -> Iterator[Text]:
    """The lines of a block: one Text of a plain file; of a .gz file Texts of about ``size`` unpacked bytes.

    Raises DataError when the file is damaged or has become shorter.
    """
    if block.file.packed:
        yield from _read_packed(block.file, size)
        return
    path = block.file.path
    with _guarded(path, lambda: open(path, "rb", buffering=0)) as file:
        start = _guarded(path, lambda: _line_start(file, max(block.start, block.file.begin), block.file))
        stop = _guarded(path, lambda: _line_start(file, max(block.stop, block.file.begin), block.file))
        buf = np.empty(stop - start, np.uint8)
        _guarded(path, lambda: _fill(file, start, memoryview(buf), path))
    yield Text(buf, lambda: block.first_line(start), True)


def _fill(file, start: int, into: memoryview, path: str) -> None:
    file.seek(start)
    while len(into):
        n = file.readinto(into)
        if not n:
            raise DataError(f"{path} became shorter while it was read")
        into = into[n:]


def _line_start(file, at: int, info: DataFile) -> int:
    """Where the first line begins whose first byte is at ``at`` or later (the file's size when there is none)."""
    if at <= info.begin or at >= info.size:
        return min(max(at, info.begin), info.size)
    at -= 1
    file.seek(at)
    while at < info.size:
        data = file.read(min(_STEP, info.size - at))
        if not data:
            raise DataError(f"{info.path} became shorter while it was read")
        found = data.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(data)
    return info.size


def _read_packed(info: DataFile, size: int) -> Iterator[Text]:
    line = info.first_line
    with open_text(info.path) as file:
        _guarded(info.path, lambda: file.read(info.begin))
        rest = b""
        while True:
            data = _guarded(info.path, lambda: file.read(size))
            last = len(data) < size or not _guarded(info.path, lambda: file.peek(1))
            data = rest + data
            end = len(data) if last else data.rfind(b"\n") + 1
            rest = data[end:]
            buf = np.frombuffer(data, np.uint8)[:end]
            yield Text(buf, lambda line=line: line, last)
            if last:
                return
            line += count_byte(buf, 10)
