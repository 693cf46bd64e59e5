"""Embeddings and a multilayer perceptron: Zhang, Du, Wang, "Deep Learning over Multi-field Categorical Data"
(FNN, arXiv 1601.02376), without its pre-training."""

from collections.abc import Sequence

import torch
from torch import nn

from hpc_ctr.errors import UsageError
from hpc_ctr.models.mlp import dropout_share, layer_sizes, mlp
from hpc_ctr.models.spec import ModelSpec, as_logits


class Dnn(nn.Module):
    """logit = MLP([vectors of all fields, dense]). Tables may differ in dim."""

    first_order = False
    wants_vectors = True

    def __init__(self, spec: ModelSpec, hidden: Sequence[int] = (400, 400, 400),
                 dropout: float = 0.0) -> None:
        """hidden: sizes of the hidden layers. dropout: probability after each of them."""
        super().__init__()
        inputs = spec.vector_floats + spec.num_dense
        if not inputs:
            raise UsageError("model dnn: there is neither a dense column nor a categorical field to learn "
                             "from; name some in data.schema")
        self.tower = mlp(inputs, layer_sizes("model.hidden", hidden), 1,
                         dropout_share("model.dropout", dropout))

    def forward(self, dense: torch.Tensor, vectors: tuple[torch.Tensor, ...],
                first: torch.Tensor | None = None) -> torch.Tensor:
        """dense [B, D], vectors [B, F_t, dim_t] a table -> logits [B]."""
        inputs = torch.cat([*(part.flatten(1) for part in vectors), dense], 1)
        return as_logits(self.tower(inputs).squeeze(1))
