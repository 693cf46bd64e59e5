"""What the dense optimizers share: flat parameters, gradients and state, and their way into checkpoints."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpc_ctr.comm.allreduce import Allreduce
from hpc_ctr.errors import UsageError

STATE_KEYS = ("x", "m", "v", "t", "vhat", "has_vhat", "global_step", "active")


class FlatParameters:
    """All trainable parameters of a model in one array, and their gradients in another; they become views.

    x, grad: [P], float32 or float64, on the parameters' device, in the order given and without padding: P is
    exactly the number of trainable parameters. Raises UsageError when there is none, or when they differ in
    dtype or device.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self.params = trainable = [p for p in params if p.requires_grad]
        if not trainable:
            raise UsageError("the model has no trainable dense parameters; it needs at least one, such as a bias")
        kinds = {(p.dtype, p.device) for p in trainable}
        if len(kinds) > 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise UsageError("the dense parameters must all be float32 or all float64 on one device, "
                             f"not {found}")
        self.x = torch.cat([p.detach().reshape(-1) for p in self.params])
        self.grad = torch.zeros_like(self.x)
        self._views: list[torch.Tensor] = []
        begin = 0
        for p in self.params:
            end = begin + p.numel()
            p.data = self.x[begin:end].view(p.shape)
            self._views.append(self.grad[begin:end].view(p.shape))
            begin = end
        self.zero_grad()

    def gather_grad(self) -> torch.Tensor:
        """The flat gradient [P]. Gradients that were replaced are copied in; a missing one counts as 0."""
        for p, view in zip(self.params, self._views):
            if p.grad is view:
                continue
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
            p.grad = view
        return self.grad

    def zero_grad(self) -> None:
        """Set the gradients to 0 and make them views of ``grad``."""
        self.grad.zero_()
        for p, view in zip(self.params, self._views):
            p.grad = view


class FlatOptimizer(torch.optim.Optimizer):
    """Base of KStepAdam and SyncAdam: one parameter group over flat arrays x, m, v, and counters.

    t: steps that changed this worker. global_step: calls of ``step``. merges: exchanges between workers.
    merged_bytes: S, the bytes of the parameters. merger: carries the sums over workers (one worker a rank).
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, betas: tuple[float, float],
                 eps: float, merger: Allreduce) -> None:
        params = list(params)
        self.flat = FlatParameters(params)
        super().__init__(self.flat.params, {"lr": lr, "betas": tuple(betas), "eps": eps})
        self.merger = merger
        self.rank, self.workers = merger.rank, merger.size
        self.m = torch.zeros_like(self.x)
        self.v = torch.zeros_like(self.x)
        self.t = 0
        self.global_step = 0
        self.merges = 0
        self._work = torch.empty_like(self.x)

    @property
    def x(self) -> torch.Tensor:
        """This worker's parameters [P]."""
        return self.flat.x

    @property
    def merged_bytes(self) -> int:
        """S: bytes of the dense parameters."""
        return self.x.numel() * self.x.element_size()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to 0. They stay views of one array, whatever ``set_to_none`` says."""
        self.flat.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the group made at construction; raises UsageError for another one."""
        if self.param_groups:
            raise UsageError("the dense optimizers take all parameters as one group")
        super().add_param_group(param_group)

    def finish(self) -> bool:
        """Bring the workers together after the last step. Collective. True when something was exchanged."""
        return False

    @torch.no_grad()
    def check_same_start(self) -> None:
        """Raise UsageError when the workers' parameters are not the same bits. Collective."""
        digest = hashlib.sha256(self.x.cpu().numpy().tobytes()).digest()
        words = np.frombuffer(digest[:16], np.uint16).astype(np.float64)
        # N * sum(w^2) = (sum w)^2 only for equal w; 16-bit words keep this exact up to a thousand workers.
        sums = torch.from_numpy(np.concatenate([words, words * words]))
        self.merger.sum_([sums], "check_start")
        total, squares = sums[:8], sums[8:]
        if not torch.equal(total * total, squares * self.workers):
            raise UsageError("the ranks start from different dense parameters; call torch.manual_seed with "
                             "the same seed on every rank before building the model")

    def averaged_x(self) -> torch.Tensor:
        """The model that a merge would give now, as a new array [P]; training is not touched. Collective."""
        return self.x.clone()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A block in which the parameters are ``averaged_x()``; then the old bits return. Collective."""
        mean = self.averaged_x()
        own = self.x.clone()
        self.x.copy_(mean)
        try:
            yield
        finally:
            self.x.copy_(own)

    def worker_state(self) -> dict[str, np.ndarray]:
        """A copy of all that this worker needs to go on bit for bit.

        x, m, v: [P] in the parameters' dtype. t, global_step: int64. vhat: [P], or [0] when has_vhat (bool)
        is False. active: bool [N], the workers that stepped since the last merge.
        """
        arrays = {"x": self.x, "m": self.m, "v": self.v}
        state = {name: tensor.cpu().numpy().copy() for name, tensor in arrays.items()}
        state |= {"t": np.array(self.t), "vhat": np.zeros(0, state["x"].dtype), "has_vhat": np.array(False),
                  "global_step": np.array(self.global_step), "active": np.zeros(self.workers, bool)}
        return state

    @torch.no_grad()
    def load_worker_state(self, state: dict[str, np.ndarray]) -> None:
        """Take over a ``worker_state()`` or a combined one. Raises UsageError when it cannot fit."""
        missing = [name for name in STATE_KEYS if name not in state]
        if missing:
            raise UsageError(f"the dense state has no {', '.join(missing)}; it was not saved by this "
                             "optimizer")
        size = len(state["x"])
        if size != self.x.numel():
            raise UsageError(f"the dense state holds {size} parameters but this model has {self.x.numel()}; "
                             "use the model options of the checkpoint")
        for name, into in (("x", self.x), ("m", self.m), ("v", self.v)):
            into.copy_(torch.from_numpy(np.asarray(state[name])))
        self.t = int(state["t"])
        self.global_step = int(state["global_step"])

    def state_dict(self) -> dict[str, Any]:
        """worker_state as tensors under "worker", and the parameter group's settings; fit for torch.save."""
        group = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        return {"worker": {name: torch.from_numpy(array) for name, array in self.worker_state().items()},
                "param_groups": [group]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a ``state_dict()``; learning rate and betas with it."""
        self.load_worker_state({name: tensor.numpy() for name, tensor in state_dict["worker"].items()})
        self.param_groups[0].update(state_dict["param_groups"][0])


def combine_worker_states(states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One state out of the N of a checkpoint, for every worker of a job with another number of them.

    x is what a merge would give (the mean over the workers that stepped since the last one, or over all), m
    and v are means over the workers that ever stepped, t is the largest. vhat and global_step are the same
    everywhere. Raises UsageError when the states are not of one moment of one job.
    """
    if not states:
        raise UsageError("the checkpoint holds no dense state")
    first = states[0]
    for state in states[1:]:
        same = (len(state["x"]) == len(first["x"]) and int(state["global_step"]) == int(first["global_step"])
                and bool(state["has_vhat"]) == bool(first["has_vhat"]))
        if not same:
            raise UsageError("the dense states are not of one checkpoint: sizes or step numbers differ")
    if len(first["active"]) not in (0, len(states)):
        raise UsageError(f"{len(states)} dense states are given but {len(first['active'])} workers wrote "
                         "them")
    active = [i for i, on in enumerate(first["active"]) if on] or list(range(len(states)))
    stepped = [i for i, state in enumerate(states) if int(state["t"]) > 0] or list(range(len(states)))
    return {"x": _mean([states[i]["x"] for i in active]), "m": _mean([states[i]["m"] for i in stepped]),
            "v": _mean([states[i]["v"] for i in stepped]),
            "t": np.array(max(int(state["t"]) for state in states)),
            "vhat": first["vhat"].copy(), "has_vhat": np.array(bool(first["has_vhat"])),
            "global_step": np.array(int(first["global_step"])), "active": np.zeros(0, bool)}


def _mean(arrays: list[np.ndarray]) -> np.ndarray:
    total = np.zeros(arrays[0].shape, np.float64)
    for array in arrays:
        total += array
    return (total / len(arrays)).astype(arrays[0].dtype)
