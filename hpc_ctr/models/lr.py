"""Logistic regression: Richardson, Dominowska, Ragno, "Predicting Clicks", WWW 2007."""

import torch
from torch import nn

from hpc_ctr.models.spec import ModelSpec


class LogisticRegression(nn.Module):
    """logit = bias + w . dense + sum of the first-order weights. Vectors are not used."""

    first_order = True
    wants_vectors = False

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        # The loss is convex: zero is as good a start as any and adds no noise.
        self.weight = nn.Parameter(torch.zeros(spec.num_dense))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, vectors: tuple[torch.Tensor, ...],
                first: torch.Tensor) -> torch.Tensor:
        """dense [B, D], first [B, F] -> logits [B]. Elementwise, so autocast leaves its precision alone."""
        return first.sum(1) + (dense * self.weight).sum(1) + self.bias
