"""``bench store``: LMDB, a numpy memmap, and h5py with fancy indexing. All update rows where they are."""

import mmap
import os
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hpc_ctr.bench.store_data import LAYOUT, WORDS, Workload
from hpc_ctr.bench.system import System

THREADS = 32
_LOAD_ROWS = 1 << 18
_H5PY_ROWS = 1000  # its selections get slower by the row the longer they are


class _InPlace(System):
    """Rows in order of their keys; whoever maps files closes them when they are to leave the page cache."""

    in_place = True

    def __init__(self, folder: Path, work: Workload, memory: int):
        super().__init__(folder, work, memory)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=self.name)

    def drop(self) -> None:
        self._close_files()
        super().drop()
        self._open_files()

    def close(self) -> None:
        self._close_files()
        self._pool.shutdown()

    @abstractmethod
    def _open_files(self) -> None:
        """Open, or map, what was closed so that the page cache lets go of it."""

    @abstractmethod
    def _close_files(self) -> None:
        """Close, or unmap; more than once does no harm."""

    def _in_order(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(number of the first row, keys, records) of all rows, by key."""
        for begin in range(0, self.work.rows, _LOAD_ROWS):
            keys = self.work.ordered[begin:begin + _LOAD_ROWS]
            yield begin, keys, self.work.records(keys, 0)

    def _numbers(self, keys: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.work.ordered, keys)


class Lmdb(_InPlace):
    """LMDB without readahead, filled in order of keys; getmulti from 32 threads; a put is one transaction, synced."""

    name = "lmdb"
    module = "lmdb"
    disk_row = 280

    def _open_files(self) -> None:
        import lmdb

        size = 2 * self.work.rows * self.disk_row + (256 << 20)  # of the map; the file grows as it must
        self._env = lmdb.open(str(self.folder / "db"), map_size=size, readahead=False)

    def _close_files(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()
            del self._env

    def load(self) -> None:
        self._open_files()
        for _, keys, records in self._in_order():
            with self._env.begin(write=True) as transaction:
                transaction.cursor().putmulti(list(self.pack_put(keys, records)), append=True)

    def pack_get(self, keys: np.ndarray) -> list[list[bytes]]:
        data = np.sort(keys).astype(">u8").tobytes()
        names = [data[at:at + 8] for at in range(0, len(data), 8)]
        step = -(-len(names) // (4 * THREADS))
        return [names[at:at + step] for at in range(0, len(names), step)]

    def get(self, packed: list[list[bytes]]) -> Any:
        return list(self._pool.map(self._get_part, packed))

    def _get_part(self, names: list[bytes]) -> list[tuple[bytes, bytes]]:
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            return cursor.getmulti(names)

    def words(self, result: Any) -> np.ndarray:
        return np.frombuffer(b"".join(value for part in result for _, value in part), np.uint32).reshape(-1, WORDS)

    def pack_put(self, keys: np.ndarray, records: np.ndarray) -> list[tuple[bytes, bytes]]:
        order = np.argsort(keys)
        names, data = keys[order].astype(">u8").tobytes(), records[order].tobytes()
        size = LAYOUT.record_bytes
        return [(names[8 * i:8 * i + 8], data[size * i:size * (i + 1)]) for i in range(len(keys))]

    def put(self, packed: list[tuple[bytes, bytes]]) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti(packed)


class Memmap(_InPlace):
    """An array on disk; 32 threads take rows; a put writes rows and msyncs. The index costs it nothing."""

    name = "memmap"
    disk_row = LAYOUT.record_bytes

    @property
    def _path(self) -> Path:
        return self.folder / "rows.bin"

    def _open_files(self) -> None:
        self._rows = np.memmap(self._path, np.uint32, "r+", shape=(self.work.rows, WORDS))
        self._rows._mmap.madvise(mmap.MADV_RANDOM)

    def _close_files(self) -> None:
        if hasattr(self, "_rows"):
            del self._rows

    def load(self) -> None:
        with open(self._path, "wb") as file:
            for _, _, records in self._in_order():
                file.write(records.tobytes())
        self._open_files()

    def pack_get(self, keys: np.ndarray) -> np.ndarray:
        return np.sort(self._numbers(keys))

    def get(self, packed: np.ndarray) -> np.ndarray:
        out = np.empty((len(packed), WORDS), np.uint32)
        parts = np.array_split(np.arange(len(packed)), 4 * THREADS)

        def take(part: np.ndarray) -> None:
            if len(part):
                np.take(self._rows, packed[part], axis=0, out=out[part[0]:part[-1] + 1], mode="clip")

        list(self._pool.map(take, parts))
        return out

    def pack_put(self, keys: np.ndarray, records: np.ndarray) -> Any:
        order = np.argsort(keys)
        return self._numbers(keys[order]), records[order]

    def put(self, packed: Any) -> None:
        numbers, records = packed
        self._rows[numbers] = records
        self._rows.flush()


class H5py(_InPlace):
    """A contiguous HDF5 dataset, rows by fancy indexing in ascending order; a put is flushed and synced."""

    name = "h5py"
    disk_row = LAYOUT.record_bytes

    @property
    def _path(self) -> Path:
        return self.folder / "rows.h5"

    def _open_files(self) -> None:
        import h5py

        self._file = h5py.File(self._path, "r+", locking=False)

    def _close_files(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
            del self._file

    def load(self) -> None:
        import h5py

        with h5py.File(self._path, "w", locking=False) as file:
            rows = file.create_dataset("rows", (self.work.rows, WORDS), np.uint32)
            for begin, keys, records in self._in_order():
                rows[begin:begin + len(keys)] = records
        self._open_files()

    def pack_get(self, keys: np.ndarray) -> np.ndarray:
        return np.sort(self._numbers(keys))

    def get(self, packed: np.ndarray) -> np.ndarray:
        rows = self._file["rows"]
        return np.concatenate([rows[packed[at:at + _H5PY_ROWS]] for at in range(0, len(packed), _H5PY_ROWS)])

    def pack_put(self, keys: np.ndarray, records: np.ndarray) -> Any:
        order = np.argsort(keys)
        return self._numbers(keys[order]), records[order]

    def put(self, packed: Any) -> None:
        numbers, records = packed
        rows = self._file["rows"]
        for at in range(0, len(numbers), _H5PY_ROWS):
            rows[numbers[at:at + _H5PY_ROWS]] = records[at:at + _H5PY_ROWS]
        self._file.flush()
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
