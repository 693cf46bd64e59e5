"""Towers: from dense features and embeddings to logits."""

from hpc_ctr.models.registry import MODELS, build, needs_first_order, option_names, resolve, wants_vectors
from hpc_ctr.models.spec import ModelSpec, TableSpec

__all__ = ["MODELS", "ModelSpec", "TableSpec", "build", "needs_first_order", "option_names", "resolve",
           "wants_vectors"]
