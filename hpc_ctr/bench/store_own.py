"""``bench store``: this project's cold store, and the disk below it."""

from typing import Any

import numpy as np

from hpc_ctr.bench.device import PAGE, RandomReads, write_file
from hpc_ctr.bench.store_data import LAYOUT, WORDS
from hpc_ctr.bench.system import System
from hpc_ctr.storage.cold import ColdStore
from hpc_ctr.storage.tiered import TieredStore


class HpcCtr(System):
    """The cold store with its default options; for popular keys with the host cache above it, as training has it."""

    name = "hpc_ctr"
    disk_row = int(2.3 * LAYOUT.stored_bytes)  # a put keeps segments below twice the live rows, and adds one
    caches = True

    def _open(self, kind: type) -> None:
        self.close()
        directory = str(self.folder / "store")
        if kind is TieredStore:
            self.store = TieredStore(directory, LAYOUT, self.memory)
        else:
            self.store = ColdStore(directory, LAYOUT)

    def load(self) -> None:
        self._open(ColdStore)
        for keys, records in self.work.load_batches():
            self.put(self.pack_put(keys, records))

    def prepare(self, case: str) -> None:
        kind = TieredStore if case == "get_zipf" else ColdStore
        if type(self.store) is not kind:
            self._open(kind)

    def pack_get(self, keys: np.ndarray) -> Any:
        return keys, np.empty((len(keys), LAYOUT.floats), LAYOUT.dtype), np.empty(len(keys), np.uint32)

    def get(self, packed: Any) -> Any:
        keys, records, t = packed
        return self.store.get(keys, records, t), records

    def words(self, result: Any) -> np.ndarray:
        found, records = result
        return records.view(np.uint32).reshape(-1, WORDS)[found]

    def pack_put(self, keys: np.ndarray, records: np.ndarray) -> Any:
        return keys, records.view(np.float32), np.ones(len(keys), np.uint32)

    def put(self, packed: Any) -> None:
        self.store.put(*packed)

    def settle(self) -> None:
        if isinstance(self.store, ColdStore):
            self.store.finish()

    def close(self) -> None:
        if hasattr(self, "store"):
            if isinstance(self.store, TieredStore):
                self.store.flush()  # what was put since it was opened is in its cache alone
            self.store.close()
            del self.store


class DeviceLimit(System):
    """The disk: a row costs one 4 KiB read at a random place, 32 under way at once; a put is one write in order."""

    name = "device_limit"
    disk_row = int(1.1 * LAYOUT.stored_bytes)
    in_place = True

    def load(self) -> None:
        path = self.folder / "device.bin"
        write_file(path, max(self.work.rows * LAYOUT.stored_bytes, 64 * PAGE))
        self._reads = RandomReads(path)
        self._calls = 0

    def get(self, packed: Any) -> None:
        self._calls += 1
        self._reads.run(len(packed), self._calls)

    def words(self, result: Any) -> None:
        return None

    def put(self, packed: Any) -> None:
        write_file(self.folder / "put.bin", len(packed[0]) * LAYOUT.stored_bytes)

    def close(self) -> None:
        if hasattr(self, "_reads"):
            self._reads.close()
