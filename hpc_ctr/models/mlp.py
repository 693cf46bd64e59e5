"""The multilayer perceptron that all towers use."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_ctr.errors import UsageError


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None = None,
        dropout: float = 0.0) -> nn.Sequential:
    """Hidden linear layers, each with ReLU (and dropout); ``outputs`` adds a last linear layer without.

    Weights are Glorot-normal, biases zero; random numbers come from torch's default generator.
    """
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [linear(inputs, size), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        inputs = size
    if outputs is not None:
        layers.append(linear(inputs, outputs))
    return nn.Sequential(*layers)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with Glorot-normal weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)))
        layer.bias.zero_()
    return layer


def layer_sizes(option: str, value: Any) -> list[int]:
    """``value`` as a list of layer sizes. Raises UsageError naming ``option``."""
    good = isinstance(value, (list, tuple)) and all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    if not good:
        raise UsageError(f"{option}: must be a list of whole numbers above 0, such as [400, 400], "
                         f"not {value!r}")
    return list(value)


def dropout_share(option: str, value: Any) -> float:
    """``value`` as a dropout probability. Raises UsageError naming ``option``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UsageError(f"{option}: must be at least 0 and below 1, not {value!r}")
    return float(value)
