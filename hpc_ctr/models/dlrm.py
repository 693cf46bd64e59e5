"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(arXiv 1906.00091)."""

from collections.abc import Sequence

import torch
from torch import nn

from hpc_ctr.errors import UsageError
from hpc_ctr.models.mlp import dropout_share, layer_sizes, mlp
from hpc_ctr.models.spec import ModelSpec, as_logits, join_vectors


class Dlrm(nn.Module):
    """A bottom MLP makes one more vector of the dense columns; a top MLP sees it and all dot products.

    Pairs are the lower triangle without the diagonal. Without dense columns there is no bottom MLP. All
    tables have the same dim.
    """

    first_order = False
    wants_vectors = True

    def __init__(self, spec: ModelSpec, bottom: Sequence[int] | None = None, top: Sequence[int] = (256, 128),
                 dropout: float = 0.0) -> None:
        """bottom: hidden sizes of the bottom MLP, the last equal to the tables' dim (default: 64 and dim).
        top: those of the top MLP. dropout: probability after each layer of the top MLP."""
        super().__init__()
        dim = spec.common_dim("dlrm")
        sizes = [64, dim] if bottom is None else layer_sizes("model.bottom", bottom)
        if sizes[-1:] != [dim]:
            raise UsageError(f"model.bottom: the last size must be the tables' dim {dim}, not {bottom!r}")
        self.bottom = mlp(spec.num_dense, sizes) if spec.num_dense else None
        vectors = spec.num_fields + (self.bottom is not None)
        rows, columns = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        inputs = len(self.pairs) + (dim if self.bottom is not None else 0)
        if not inputs:
            raise UsageError("model dlrm: one categorical field and no dense column make no pair; "
                             "use model.name dnn")
        self.top = mlp(inputs, layer_sizes("model.top", top), 1, dropout_share("model.dropout", dropout))

    def forward(self, dense: torch.Tensor, vectors: tuple[torch.Tensor, ...],
                first: torch.Tensor | None = None) -> torch.Tensor:
        """dense [B, D], vectors [B, F_t, dim] a table -> logits [B]."""
        fields = join_vectors(vectors)
        parts = []
        if self.bottom is not None:
            bottom = self.bottom(dense)
            parts.append(bottom)
            fields = torch.cat([bottom.unsqueeze(1).to(fields.dtype), fields], 1)
        products = torch.bmm(fields, fields.transpose(1, 2)).flatten(1)
        parts.append(products.index_select(1, self.pairs))
        return as_logits(self.top(torch.cat(parts, 1)).squeeze(1))
