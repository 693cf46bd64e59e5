"""Options of the dense optimizer and of its merge: the sections ``dense`` and ``merge`` of a job file."""

import math
from dataclasses import dataclass
from typing import Any

from hpc_ctr.errors import UsageError


@dataclass
class DenseOptions:
    """Adam on the dense parameters (towers), the same for merge.dense kstep and sync."""

    lr: float = 1e-3  # learning rate
    beta1: float = 0.9  # decay of the first moment m
    beta2: float = 0.999  # decay of the second moment v
    eps: float = 1e-8  # added to the root of the denominator

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise UsageError naming the first setting that is not possible."""
        if not 0 < _number("dense.lr", self.lr):
            raise UsageError(f"dense.lr: must be above 0, not {self.lr}")
        for name in ("beta1", "beta2"):
            value = _number(f"dense.{name}", getattr(self, name))
            if not 0 <= value < 1:
                raise UsageError(f"dense.{name}: must be at least 0 and below 1, not {value}")
        if not 0 < _number("dense.eps", self.eps):
            raise UsageError(f"dense.eps: must be above 0, not {self.eps}")


@dataclass
class MergeOptions:
    """How the dense parameters of the workers stay together."""

    dense: str = "kstep"  # kstep: local steps, merged every k; sync: gradients summed in every step
    k: int = 20  # local steps between merges
    mode: str = "adam"  # v-hat becomes the mean of second moments (adam), or its running maximum (amsgrad)
    guard: bool = True  # the denominator is never below the worker's own second moment
    bias_correction: bool = True  # Adam's factors 1/(1-beta^t); off, with guard off, is the paper's form
    k_start: int = 1  # with grow_steps: k at first
    grow_steps: int = 0  # k doubles every so many steps, from k_start until it has grown to k; 0: k is constant
    warmup_steps: int = 0  # steps at the beginning that merge every time
    overlap: bool = False  # a merge goes on beside the next step and is applied after it
    dense_workers: str = "rank"  # what steps alone: rank | node (its ranks average their gradients in every step)
    backend: str = "auto"  # auto (Horovod where it is installed) | horovod | mpi
    route: str = "auto"  # flat: over all ranks at once | nodes: inside nodes, between them, back | auto: what sends less

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise UsageError naming the first setting that is not possible."""
        _one_of("merge.dense", self.dense, ("kstep", "sync"))
        _one_of("merge.mode", self.mode, ("adam", "amsgrad"))
        _one_of("merge.backend", self.backend, ("auto", "horovod", "mpi"))
        _one_of("merge.dense_workers", self.dense_workers, ("rank", "node"))
        _one_of("merge.route", self.route, ("auto", "flat", "nodes"))
        for name, least in (("k", 1), ("k_start", 1), ("grow_steps", 0), ("warmup_steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"merge.{name}: must be a whole number, not {value!r}")
            if value < least:
                raise UsageError(f"merge.{name}: must be at least {least}, not {value}")
        if self.grow_steps and self.k_start > self.k:
            raise UsageError(f"merge.k_start: {self.k_start} cannot grow to merge.k {self.k}; give a smaller one")
        if self.backend == "horovod" and (self.route == "nodes" or self.dense_workers == "node"):
            name = "route: nodes" if self.route == "nodes" else "dense_workers: node"
            raise UsageError(f"merge.{name} sums through MPI; set merge.backend: auto or mpi")
        for name in ("guard", "bias_correction", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"merge.{name}: must be true or false, not {getattr(self, name)!r}")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}: must be one of {', '.join(allowed)}, not {value!r}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{name}: must be a number, not {value!r}")
    return value
