"""The rows of ``bench store``, and which of them are asked for together."""

import zlib
from collections.abc import Iterator

import numpy as np

from hpc_ctr.data.keys import mix
from hpc_ctr.kernels.hashing import mix_range
from hpc_ctr.storage.record import RecordLayout

LAYOUT = RecordLayout(16, 32)  # dim 16 and Adam's state in float32: 192 bytes
WORDS = LAYOUT.words
ROW_BYTES = 8 + LAYOUT.record_bytes  # what a user stores: key and record
_LOAD_PARTS, _LOAD_ROWS = 20, 1 << 20
_PATTERNS = 1 << 12


class Workload:
    """``rows`` rows with random keys, and seeded batches of ``batch`` distinct keys out of them.

    keys uint64 [rows], in the order in which they are loaded; ordered: the same, ascending.
    """

    def __init__(self, rows: int, batch: int, zipf: float, seed: int = 1):
        self.rows, self.batch, self.zipf, self.seed = rows, batch, zipf, seed
        self.keys = mix_range(np.uint64(mix(seed)), rows)
        self.ordered = np.sort(self.keys)
        self._rarity: np.ndarray | None = None
        # random words: nothing that a store could compress
        self._patterns = np.random.default_rng(seed).integers(0, 1 << 32, (_PATTERNS, WORDS), np.uint32)

    def records(self, keys: np.ndarray, version: int) -> np.ndarray:
        """uint32 [n, 48]: the rows of keys, which tell key (words 0 and 1) and version (word 2)."""
        out = self._patterns[((keys + np.uint64(version)) % np.uint64(_PATTERNS)).astype(np.int64)]
        out[:, :2] = keys.view(np.uint32).reshape(-1, 2)
        out[:, 2] = version
        return out

    def load_batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(keys, records) of all rows once, in random order of keys, at most a million at a time."""
        step = min(max(self.batch, self.rows // _LOAD_PARTS), _LOAD_ROWS)
        for begin in range(0, self.rows, step):
            keys = self.keys[begin:begin + step]
            yield keys, self.records(keys, 0)

    def uniform(self, purpose: str, number: int, batches: int = 1) -> np.ndarray:
        """uint64 [batches * batch] distinct keys, each as likely as any other. Same arguments, same keys."""
        rng = self._rng(purpose, number)
        return self.keys[rng.choice(self.rows, batches * self.batch, replace=False)]

    def popular(self, purpose: str, number: int) -> np.ndarray:
        """uint64 [batch]: the first ``batch`` different keys of draws by a power law, in random order.

        Which keys are popular has nothing to do with their order of loading.
        """
        if self._rarity is None:
            rank = self._rng("ranks", 0).permutation(self.rows) + 1.0
            self._rarity = rank ** self.zipf
        rng = self._rng(purpose, number)
        # draws without replacement: those whose waiting time, exponential with their probability as rate, ends first
        waiting = rng.standard_exponential(self.rows) * self._rarity
        first = np.argpartition(waiting, self.batch)[:self.batch] if self.batch < self.rows else np.arange(self.rows)
        return self.keys[rng.permutation(first)]

    def _rng(self, purpose: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(purpose.encode()), number])


def right(words: np.ndarray, keys: np.ndarray, version: int = -1) -> bool:
    """Whether ``words`` uint32 [n, 48] are the rows of exactly these keys, in any order; of one version if given."""
    found = np.ascontiguousarray(words[:, :2]).view(np.uint64).reshape(-1)
    return len(found) == len(keys) and bool((np.sort(found) == np.sort(keys)).all()) \
        and (version < 0 or bool((words[:, 2] == version).all()))
