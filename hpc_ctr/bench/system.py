"""What ``bench store`` asks of each store that it measures."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hpc_ctr.bench import page_cache
from hpc_ctr.bench.store_data import Workload


class System(ABC):
    """One store with the rows of a workload. One thread calls it.

    A caller turns keys and records into the store's own arguments with ``pack_get`` and ``pack_put``, which are not
    timed, then times ``get``, ``put`` and ``settle``.

    name: as in the results. module: what must be importable ("" = nothing). disk_row: bytes of disk a row may take for a
    while. in_place: a put leaves every row where it is. caches: it keeps rows in memory between batches.
    """

    name: ClassVar[str]
    module: ClassVar[str] = ""
    disk_row: ClassVar[int]
    in_place: ClassVar[bool] = False
    caches: ClassVar[bool] = False

    def __init__(self, folder: Path, work: Workload, memory: int):
        self.folder, self.work, self.memory = folder, work, memory
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def load(self) -> None:
        """Store all rows."""

    def prepare(self, case: str) -> None:  # noqa: B027  (most have nothing to do)
        """Be at the store's best for a case; not timed."""

    def files(self) -> Iterable[Path]:
        """The files that hold the rows."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def drop(self) -> None:
        """Take the rows out of the page cache."""
        page_cache.drop(self.files())

    def pack_get(self, keys: np.ndarray) -> Any:
        """The store's own form of keys uint64 [n]."""
        return keys

    @abstractmethod
    def get(self, packed: Any) -> Any:
        """Read the rows."""

    def words(self, result: Any) -> np.ndarray | None:
        """What ``get`` returned as uint32 [n, 48], in any order; None where there are no rows to look at."""
        return result

    def pack_put(self, keys: np.ndarray, records: np.ndarray) -> Any:
        """The store's own form of keys uint64 [n] and records uint32 [n, 48]."""
        return keys, records

    @abstractmethod
    def put(self, packed: Any) -> None:
        """Overwrite the rows."""

    def settle(self) -> None:  # noqa: B027  (most have nothing to do)
        """Wait until everything that puts have set off in the background is done."""

    def close(self) -> None:  # noqa: B027  (most have nothing to do)
        """Close files and end threads."""
