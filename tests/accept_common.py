"""Models that a user might bring, and made-up batches, for the oracle and the acceptance tests."""

from dataclasses import dataclass

import numpy as np
import torch

from hpc_ctr.data.batch import Batch

# ---------------------------------------------------------------- models that a user might bring


class TinyNet(torch.nn.Module):
    """Two smooth layers over dense columns and all vectors, plus the pairwise products of the fields.

    Smooth, so that a difference of one rounding stays one; its first values come from its own fixed seed.
    """

    first_order = False

    def __init__(self, spec, hidden: int = 6):
        super().__init__()
        fields = sum(len(table.fields) for table in spec.tables)
        dim = spec.tables[0].dim
        rng = np.random.default_rng(2022)
        dtype = getattr(torch, str(spec.dtype).removeprefix("torch."))

        def drawn(*shape):
            scale = 1 / np.sqrt(max(shape[0], 1))
            return torch.nn.Parameter(torch.from_numpy(rng.normal(0, scale, shape)).to(dtype))

        # in alphabetical order: flat parameters then mean the same in definition order and in order of names
        self.bias = drawn(hidden)
        self.inner = drawn(spec.num_dense + fields * dim, hidden)
        self.outer = drawn(hidden)
        self.pair = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, dense, vectors, first=None):
        """Logits [B] of dense [B, D], vectors ([B, F, dim],) and first-order weights [B, F] or None."""
        embedded = vectors[0]
        inputs = torch.cat([dense, embedded.flatten(1)], dim=1)
        logits = torch.tanh(inputs @ self.inner + self.bias) @ self.outer
        pairs = 0.5 * (embedded.sum(1) ** 2 - (embedded ** 2).sum(1)).sum(1)
        logits = logits + self.pair * pairs
        return logits if first is None else logits + first.sum(1)


class TinyWideNet(TinyNet):
    """TinyNet that asks for first-order weights beside the vectors."""

    first_order = True


@dataclass(frozen=True)
class PlainTable:
    """The part of a table that a model looks at."""

    name: str
    fields: tuple
    dim: int


@dataclass(frozen=True)
class PlainSpec:
    """The part of a model spec that a model looks at."""

    num_dense: int
    tables: tuple
    dtype: str


def plain_spec(num_dense: int, fields: int, dim: int, dtype: str) -> PlainSpec:
    """A spec of one table that holds all ``fields``."""
    return PlainSpec(num_dense, (PlainTable("default", tuple(range(fields)), dim),), dtype)


# ---------------------------------------------------------------- batches


def mixed_keys(field: int, ids: np.ndarray) -> np.ndarray:
    """uint64 keys, well spread over all 64 bits, of the small integers ``ids`` of one field (splitmix64)."""
    with np.errstate(over="ignore"):
        z = ids.astype(np.uint64) + np.uint64(field + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


NUM_DENSE = 3
# (ids, least and most ids in a bag): two single-valued fields, one multi-valued, one multi-valued and
# often empty
FIELDS = ((40, 1, 1), (90, 1, 1), (30, 1, 4), (25, 0, 2))
FIELD_IS_MULTI = tuple(most > 1 for _, _, most in FIELDS)


def random_batch(rng: np.random.Generator, samples: int, num_dense: int = NUM_DENSE, fields=FIELDS,
                 empty_field: bool = False) -> Batch:
    """One batch with power-law ids and clicks that depend on them; ``empty_field`` empties all bags of the
    last.
    """
    keys, lengths = [], []
    score = np.zeros(samples)
    for number, (ids, least, most) in enumerate(fields):
        size = rng.integers(least, most + 1, samples)
        if empty_field and number == len(fields) - 1:
            size[:] = 0
        drawn = np.minimum(rng.zipf(1.3, int(size.sum())) - 1, ids - 1)
        keys.append(mixed_keys(number, drawn))
        lengths.append(size)
        score += np.bincount(np.repeat(np.arange(samples), size), np.sin(drawn * 1.7 + number), samples)
    dense = rng.normal(0, 1, (samples, num_dense)).astype(np.float32)
    score = score + dense[:, :1].sum(1)
    label = (rng.random(samples) < 1 / (1 + np.exp(-score))).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return Batch(label, dense, np.concatenate(keys).astype(np.uint64), offsets)


DATA_CASES = ("even", "uneven", "starved", "holes")


def rank_batches(case: str, ranks: int, steps: int, samples: int, seed: int = 0) -> list[list[Batch]]:
    """Batches of every rank, ``[rank][step]``.

    even: all alike. uneven: sizes from 1 to twice ``samples``; rank r has r * 3 batches fewer. starved:
    the last
    rank has no batch at all (for one rank: as even). holes: some batches have size 0 and the last field is
    empty
    in every bag of many others.
    """
    rng = np.random.default_rng([seed, ranks, steps, samples, DATA_CASES.index(case)])
    out: list[list[Batch]] = []
    for rank in range(ranks):
        count = steps
        if case == "uneven":
            count = max(steps - 3 * rank, 0)
        if case == "starved" and ranks > 1 and rank == ranks - 1:
            count = 0
        mine = []
        for step in range(count):
            size = int(rng.integers(1, 2 * samples + 1)) if case == "uneven" else samples
            if case == "holes" and (step + rank) % 4 == 1:
                mine.append(Batch.empty(NUM_DENSE))
            else:
                mine.append(random_batch(rng, size, empty_field=case == "holes" and step % 3 != 0))
        out.append(mine)
    return out


def by_step(per_rank: list[list[Batch]]) -> list[list[Batch]]:
    """``[rank][step]`` to ``[step][rank]``, filled up with batches of no samples."""
    steps = max((len(mine) for mine in per_rank), default=0)
    return [[mine[s] if s < len(mine) else Batch.empty(NUM_DENSE) for mine in per_rank] for s in range(steps)]


def concatenate(batches: list[Batch]) -> Batch:
    """One batch with the samples of all, in order."""
    full = [b for b in batches if b.size]
    if not full:
        return batches[0]
    fields = (len(full[0].offsets) - 1) // full[0].size
    keys, lengths = [], []
    for f in range(fields):
        for b in full:
            bounds = b.offsets[f * b.size:(f + 1) * b.size + 1]
            keys.append(b.keys[bounds[0]:bounds[-1]])
            lengths.append(np.diff(bounds))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return Batch(np.concatenate([b.label for b in full]), np.concatenate([b.dense for b in full]),
                 np.concatenate(keys), offsets)
