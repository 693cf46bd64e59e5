"""DeepFM: Guo, Tang, Ye, Li, He, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction"
(arXiv 1703.04247)."""

from collections.abc import Sequence

import torch
from torch import nn

from hpc_ctr.models.lr import LogisticRegression
from hpc_ctr.models.mlp import dropout_share, layer_sizes, mlp
from hpc_ctr.models.spec import ModelSpec, as_logits, join_vectors


class DeepFm(nn.Module):
    """logit = first order + sum over field pairs of <v_i, v_j> + MLP([vectors, dense]).

    Dense columns take part in the first order and in the MLP; pairs are those of the categorical fields. All
    tables have the same dim.
    """

    first_order = True
    wants_vectors = True

    def __init__(self, spec: ModelSpec, hidden: Sequence[int] = (256, 128), dropout: float = 0.0) -> None:
        """hidden: sizes of the MLP's hidden layers. dropout: probability after each of them."""
        super().__init__()
        spec.common_dim("deepfm")
        self.tower = mlp(spec.vector_floats + spec.num_dense, layer_sizes("model.hidden", hidden), 1,
                         dropout_share("model.dropout", dropout))
        self.linear = LogisticRegression(spec)

    def forward(self, dense: torch.Tensor, vectors: tuple[torch.Tensor, ...],
                first: torch.Tensor) -> torch.Tensor:
        """dense [B, D], vectors [B, F_t, dim] a table, first [B, F] -> logits [B]."""
        fields = join_vectors(vectors)
        # sum over pairs i < j of <v_i, v_j> = (|sum v|^2 - sum |v|^2) / 2: F terms instead of F^2.
        total = fields.sum(1)
        pairs = 0.5 * ((total * total).sum(1) - (fields * fields).sum((1, 2)))
        deep = self.tower(torch.cat([fields.flatten(1), dense], 1)).squeeze(1)
        return self.linear(dense, vectors, first) + pairs + as_logits(deep)
