"""``bench store``: RocksDB through rocksdict, as it comes and at its best."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hpc_ctr.bench.store_data import LAYOUT, ROW_BYTES, WORDS, Workload
from hpc_ctr.bench.system import System

THREADS = 64
_BUSY = ("rocksdb.num-running-flushes", "rocksdb.mem-table-flush-pending", "rocksdb.num-running-compactions",
         "rocksdb.compaction-pending")


class RocksDefault(System):
    """Default options, the page cache below, multi_get in one thread; compaction as RocksDB itself decides."""

    name = "rocksdb_default"
    module = "rocksdict"
    disk_row = int(2.3 * ROW_BYTES)
    caches = True

    def _options(self, case: str) -> Any:
        from rocksdict import Options

        return Options(raw_mode=True)

    def _open(self, case: str) -> None:
        from rocksdict import Rdict

        self._close_db()
        self.db = Rdict(str(self.folder / "db"), self._options(case))

    def load(self) -> None:
        self._open("put")
        for keys, records in self.work.load_batches():
            self.put(self.pack_put(keys, records))
        self.settle()

    def pack_get(self, keys: np.ndarray) -> list[bytes]:
        # big-endian, so that the order of bytes is that of the keys; neighbours share a block
        return _slices(np.sort(keys).astype(">u8"), 8)

    def get(self, packed: list[bytes]) -> Any:
        return self.db.get(packed)

    def words(self, result: Any) -> np.ndarray:
        return np.frombuffer(b"".join(value for value in result if value is not None), np.uint32).reshape(-1, WORDS)

    def pack_put(self, keys: np.ndarray, records: np.ndarray) -> Any:
        order = np.argsort(keys)
        return (_slices(keys[order].astype(">u8"), 8), _slices(records[order], LAYOUT.record_bytes))

    def put(self, packed: Any) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, value in zip(*packed):
            batch.put(key, value)
        self._write(batch)

    def _write(self, batch: Any) -> None:
        self.db.write(batch)

    def settle(self) -> None:
        self.db.flush(True)
        quiet = 0
        while quiet < 3:  # one job may set off the next a moment later
            quiet = 0 if any(self.db.property_int_value(name) for name in _BUSY) else quiet + 1
            time.sleep(0.005)

    def _close_db(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
            del self.db

    def close(self) -> None:
        self._close_db()


class RocksBest(RocksDefault):
    """Reads around the page cache, multi_get from 64 threads, bloom filters, no compression, all compacted; puts without
    its log. For popular keys the block cache takes the memory that the others have, index and filters counted."""

    name = "rocksdb_best"

    def __init__(self, folder, work: Workload, memory: int):
        super().__init__(folder, work, memory)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rocksdb")
        self._case = ""

    def _options(self, case: str) -> Any:
        from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options

        from hpc_ctr.cluster.cpus import affinity

        options, table = Options(raw_mode=True), BlockBasedOptions()
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(DBCompressionType.none())
        options.increase_parallelism(max(2, len(affinity())))
        options.set_max_background_jobs(max(4, len(affinity())))
        options.set_max_subcompactions(len(affinity()))
        options.set_write_buffer_size(128 << 20)
        options.set_max_write_buffer_number(4)
        options.set_max_open_files(-1)
        table.set_bloom_filter(10, False)
        if case == "get_zipf":
            table.set_block_cache(Cache(self.memory))
            table.set_cache_index_and_filter_blocks(True)
        else:
            table.set_block_cache(Cache(8 << 20))  # rows that nobody asks for twice are not worth keeping
        options.set_block_based_table_factory(table)
        return options

    def _open(self, case: str) -> None:
        super()._open(case)
        self._case = case

    def prepare(self, case: str) -> None:
        if (case == "get_zipf") != (self._case == "get_zipf"):
            self._open(case)
        if case != "put":
            self.db.compact_range(None, None)
            self.settle()

    def get(self, packed: list[bytes]) -> Any:
        step = -(-len(packed) // (4 * THREADS))
        return list(self._pool.map(self.db.get, [packed[at:at + step] for at in range(0, len(packed), step)]))

    def words(self, result: Any) -> np.ndarray:
        return super().words([value for part in result for value in part])

    def _write(self, batch: Any) -> None:
        from rocksdict import WriteOptions

        options = WriteOptions()
        options.disable_wal = True
        self.db.write(batch, options)

    def close(self) -> None:
        super().close()
        self._pool.shutdown()


def _slices(array: np.ndarray, size: int) -> list[bytes]:
    data = np.ascontiguousarray(array).tobytes()
    return [data[at:at + size] for at in range(0, len(data), size)]
