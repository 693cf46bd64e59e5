"""From a rank's batches to passes: how many steps all ranks take together, and what each trains on."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_ctr.comm.session import together
from hpc_ctr.data.batch import Batch
from hpc_ctr.embedding.table import Table
from hpc_ctr.embedding.working_set import table_keys
from hpc_ctr.errors import UsageError
from hpc_ctr.kernels.dedup import dedup
from hpc_ctr.kernels.keyset import KeySet
from hpc_ctr.train.plan import PassBudget
from hpc_ctr.units import format_bytes


@dataclass(frozen=True)
class Pass:
    """This rank's share of a pass: a batch for each step (empty where the rank ran out of data).

    samples: int64 [steps, N], how many samples every rank has in each step. epoch: which it is of; position: the cursor
    after its last batch.
    """

    batches: list[Batch]
    samples: np.ndarray
    epoch: int
    position: Any

    @property
    def steps(self) -> int:
        """Steps that every rank takes."""
        return len(self.batches)


class Feed:
    """A rank's batches over all epochs, read ahead far enough to form the next pass.

    What was read ahead, or handed out, but not trained on is not part of any checkpoint: ``trained`` moves its cursor.
    """

    def __init__(self, source: Any, epochs: int, comm: Any, tables: list[Table], budget: PassBudget,
                 epoch: int = 0, state: Any = None):
        self.source = source
        self.epochs = epochs
        self.comm = comm
        self.tables = tables
        self.budget = budget
        self.epoch = epoch
        self._queue: deque[tuple[Batch, Any, int]] = deque()
        self._open(state)
        self._done = (epoch, self._position)

    def next_pass(self, limit: int) -> Pass | None:
        """The next pass of at most ``limit`` steps, or None when all epochs are done. Collective.

        A pass ends with its epoch; ranks that have less data take part with empty batches.
        """
        while self.epoch < self.epochs:
            capped = False
            with together(self.comm):
                capped = self._fill(limit)
            have = np.array([len(self._queue), int(capped), int(self._ended)], np.int64)
            all_have = np.empty((self.comm.size, 3), np.int64)
            self.comm.Allgather(have, all_have)
            steps = min(limit, int(all_have[:, 0].max()))
            if all_have[:, 1].any():
                steps = min(steps, int(all_have[all_have[:, 1] == 1, 0].min()))
            if steps > 0:
                return self.take(steps)
            self.source.check_bad_rows(self.bad_rows())
            self.epoch += 1
            if self.epoch < self.epochs:
                self._open(None)
        return None

    def bad_rows(self) -> Any:
        """Rows of this epoch that could not be read so far, over all ranks. Collective."""
        return self.source.merge_bad_rows(self.comm.allgather(self.source.bad_rows))

    def take(self, steps: int) -> Pass:
        """The next ``steps`` batches of the queue, with empty ones behind them where it is short. Collective."""
        taken = [self._queue.popleft() for _ in range(min(steps, len(self._queue)))]
        if taken:
            self._position = taken[-1][1]
        self._last = taken
        batches = [batch for batch, _, _ in taken]
        batches += [Batch.empty(self.source.num_dense)] * (steps - len(batches))
        samples = np.empty((self.comm.size, steps), np.int64)
        self.comm.Allgather(np.array([batch.size for batch in batches], np.int64), samples)
        return Pass(batches, np.ascontiguousarray(samples.T), self.epoch, self._position)

    def put_back(self, position: Any) -> None:
        """Undo the last ``take``; ``position`` is what it was before."""
        self._queue.extendleft(reversed(self._last))
        self._position = position
        self._last = []

    @property
    def position(self) -> Any:
        """Cursor after the last batch that was handed out."""
        return self._position

    def trained(self, work: Pass) -> None:
        """All steps of a pass were taken: a checkpoint goes on behind it."""
        self._done = (work.epoch, work.position)

    def cursor(self) -> tuple[int, Any]:
        """Epoch and cursor after the last pass that was trained on; the number of epochs when all of them are."""
        epoch, position = self._done
        return (self.epochs if self.epoch == self.epochs else epoch), position

    def close(self) -> None:
        """End the reader thread."""
        self._stream.close()

    def _open(self, state: Any) -> None:
        if state is None:
            state = self.source.start(self.epoch)
        self._stream = self.source.stream(state)
        self._position = self._stream.position()
        self._ended = False

    def _fill(self, limit: int) -> bool:
        """Read until there are ``limit`` batches, the epoch ends or the budget is full (then True)."""
        seen = [KeySet() for _ in self.tables]
        used = 0
        kept = 0
        while kept < limit:
            if kept == len(self._queue):
                batch = next(self._stream, None)
                if batch is None:
                    self._ended = True
                    self._stream.close()
                    return False
                self._queue.append((batch, self._stream.position(), 0))
            batch = self._queue[kept][0]
            used += batch.nbytes
            for table, keys_seen in zip(self.tables, seen):
                distinct, _ = dedup(table_keys(batch, table)[0])
                new = keys_seen.add(distinct)
                used += self.budget.bytes_of(table, new, len(distinct), len(batch.keys))
            if used > self.budget.bytes:
                if kept == 0:
                    raise UsageError(
                        f"storage.host_budget: not even one batch fits: a pass may take "
                        f"{format_bytes(self.budget.bytes)} of it and one batch of {batch.size} samples needs "
                        f"{format_bytes(used)}; raise storage.host_budget or lower data.batch_size")
                return True
            kept += 1
        return False

