"""What a model is told about its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpc_ctr.errors import UsageError


@dataclass(frozen=True)
class TableSpec:
    """One embedding table: the names of its fields, in schema order, and the floats of a vector."""

    name: str
    fields: Sequence[str]
    dim: int


@dataclass(frozen=True)
class ModelSpec:
    """D = num_dense dense columns, and the tables whose vectors a model gets; dtype of its parameters.

    dtype: torch.float32 or torch.float64, or its name.
    """

    num_dense: int
    tables: Sequence[TableSpec]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", getattr(torch, self.dtype))

    @property
    def num_fields(self) -> int:
        """F: categorical fields of all tables."""
        return sum(len(table.fields) for table in self.tables)

    @property
    def vector_floats(self) -> int:
        """Floats of all vectors of one sample."""
        return sum(len(table.fields) * table.dim for table in self.tables)

    def common_dim(self, model: str) -> int:
        """The dim that all tables share. Raises UsageError, naming ``model``, where they differ or are 0."""
        dims = sorted({table.dim for table in self.tables if len(table.fields)})
        if len(dims) != 1 or dims[0] < 1:
            found = ", ".join(map(str, dims)) or "none"
            raise UsageError(f"model {model} multiplies vectors of different fields, so all tables need the "
                             f"same dim of at least 1 (found: {found})")
        return dims[0]


def join_vectors(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Vectors [B, F_t, dim] of all tables as one tensor [B, F, dim]."""
    return vectors[0] if len(vectors) == 1 else torch.cat(tuple(vectors), 1)


def as_logits(values: torch.Tensor) -> torch.Tensor:
    """Values in half precision (autocast) become float32; others are left alone."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
