"""What the dense optimizers share: flat parameters, gradients and state, and their way into checkpoints."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpc_ctr.comm.allreduce import Allreduce
from hpc_ctr.errors import DataError, UsageError

Param = torch.nn.Parameter | tuple[str, torch.nn.Parameter]
STATE_KEYS = ("x", "m", "v", "t", "vhat", "has_vhat", "global_step", "active")
LATE_KEYS = ("late_x", "late_own", "late_vhat")


class FlatParameters:
    """All trainable parameters of a model in one array, and their gradients in another; they become views.

    x, grad: [P], float32 or float64, on the parameters' device, in the order given and without padding: P is
    exactly the number of trainable parameters. x_and_work: [2P], x and after it as much room for an optimizer, so that
    both can travel as one. params: parameters, or pairs of a name and a parameter; names: theirs. Raises UsageError when
    there is none, or when they differ in dtype or device.
    """

    def __init__(self, params: Iterable[Param]) -> None:
        named = [p if isinstance(p, tuple) else (f"parameter {i}", p) for i, p in enumerate(params)]
        named = [(name, p) for name, p in named if p.requires_grad]
        self.names = [name for name, _ in named]
        self.params = trainable = [p for _, p in named]
        if not trainable:
            raise UsageError("the model has no trainable dense parameters; it needs at least one, such as a bias")
        kinds = {(p.dtype, p.device) for p in trainable}
        if len(kinds) > 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise UsageError("the dense parameters must all be float32 or all float64 on one device, "
                             f"not {found}")
        x = torch.cat([p.detach().reshape(-1) for p in self.params])
        self.x_and_work = torch.cat([x, torch.zeros_like(x)])
        self.x = self.x_and_work[:len(x)]
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

    def name_at(self, place: int) -> str:
        """Name of the parameter that has element ``place`` of the flat arrays."""
        for name, p in zip(self.names, self.params):
            if place < p.numel():
                return name
            place -= p.numel()
        raise IndexError(place)

    def zero_grad(self) -> None:
        """Set the gradients to 0 and make them views of ``grad``."""
        self.grad.zero_()
        for p, view in zip(self.params, self._views):
            p.grad = view


class FlatOptimizer(torch.optim.Optimizer):
    """Base of KStepAdam and SyncAdam: one parameter group over flat arrays x, m, v, and counters.

    t: steps that changed this worker. global_step: calls of ``step``. merges: exchanges between workers.
    merged_bytes: S, the bytes of the parameters. merger: carries the sums over workers. members: the ranks of each
    worker, by worker; as a rule one each.
    """

    members: list[list[int]]

    def __init__(self, params: Iterable[Param], lr: float, betas: tuple[float, float],
                 eps: float, merger: Allreduce) -> None:
        self.flat = FlatParameters(params)
        super().__init__(self.flat.params, {"lr": lr, "betas": tuple(betas), "eps": eps})
        self.merger = merger
        self.rank, self.workers = merger.rank, merger.size
        self.members = [[worker] for worker in range(self.workers)]
        self.m = torch.zeros_like(self.x)
        self.v = torch.zeros_like(self.x)
        self.t = 0
        self.global_step = 0
        self.merges = 0
        self._work = self.flat.x_and_work[len(self.x):]

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

    def stop_unless_finite(self, sums: torch.Tensor, bad: dict[str, int], merger: Allreduce) -> None:
        """Raise DataError on all ranks when a sum over them holds a NaN or an infinity. Collective over ``merger``.

        bad: by what was summed, 1 + the place of the first element of this rank's part that was not finite, or 0 (see
        ``first_bad``). Nothing travels when all is well: what is not finite stays so in every sum, and all ranks have
        the same sum.
        """
        if _all_finite(sums):
            return
        told = torch.zeros(merger.size, len(bad), dtype=torch.int64)
        told[merger.rank] = torch.tensor(list(bad.values()))
        merger.sum_([told], "check_finite")
        remedy = "lower dense.lr, or look for extreme values in the dense columns"
        where = told.nonzero()
        if len(where):
            rank, kind = where[0].tolist()
            name = self.flat.name_at(int(told[rank, kind]) - 1)
            raise DataError(f"the {list(bad)[kind]} of {name} is not finite at step {self.global_step} on {merger.peers} "
                            f"{rank}; {remedy}")
        place = int((~torch.isfinite(sums)).nonzero()[0])
        raise DataError(f"the sum over {merger.peers}s of the {list(bad)[place // self.x.numel()]} of "
                        f"{self.flat.name_at(place % self.x.numel())} overflows at step {self.global_step}; {remedy}")

    def averaged_x(self) -> torch.Tensor:
        """The model that a merge would give now, as a new array [P]; training is not touched. Collective."""
        return self.x.clone()

    def _samples(self, samples: np.ndarray | None) -> np.ndarray:
        """Samples of every rank in this step, int64 [ranks]; ones for None. Raises ValueError for another shape."""
        ranks = sum(len(group) for group in self.members)
        counts = np.ones(ranks, np.int64) if samples is None else np.asarray(samples).astype(np.int64)
        if counts.shape != (ranks,):
            raise ValueError(f"step: samples must have one entry for each of {ranks} workers, not shape {counts.shape}")
        return counts

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
        is False. active: bool [N], the workers that stepped since the last merge; worker: int64, which this is.
        late_x, late_own, late_vhat: [P], or [0] each: the merge
        that is under way (KStepAdam, ``overlap``): mean x, own x when it began, and the vhat that it brings.
        """
        arrays = {"x": self.x, "m": self.m, "v": self.v}
        state = {name: tensor.cpu().numpy().copy() for name, tensor in arrays.items()}
        state |= {"t": np.array(self.t), "vhat": np.zeros(0, state["x"].dtype), "has_vhat": np.array(False),
                  "global_step": np.array(self.global_step), "active": np.zeros(self.workers, bool),
                  "worker": np.array(self.rank)}
        return state | {name: np.zeros(0, state["x"].dtype) for name in LATE_KEYS}

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


def first_bad(array: torch.Tensor) -> int:
    """1 + the place of the first element of ``array`` [P] that is not finite; 0 when all are."""
    return 0 if _all_finite(array) else int((~torch.isfinite(array)).nonzero()[0]) + 1


def _all_finite(array: torch.Tensor) -> bool:
    # one pass without memory; only where the sum itself overflows it has to be looked at one by one
    return bool(torch.isfinite(array.sum())) or bool(torch.isfinite(array).all())


def combine_worker_states(states: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One state out of those that all ranks saved, for every worker of a job with other workers.

    x is what a merge would give (the mean over the workers that stepped since the last one, or over all), m
    and v are means over the workers that ever stepped, t is the largest. vhat and global_step are the same
    everywhere. A merge that was still to be applied is. Raises UsageError when the states are not of one moment of one
    job.
    """
    if not states:
        raise UsageError("the checkpoint holds no dense state")
    first = states[0]
    by_worker: dict[int, dict[str, np.ndarray]] = {}
    for rank, state in enumerate(states):
        same = (len(state["x"]) == len(first["x"]) and int(state["global_step"]) == int(first["global_step"])
                and bool(state["has_vhat"]) == bool(first["has_vhat"]))
        if not same:
            raise UsageError("the dense states are not of one checkpoint: sizes or step numbers differ")
        by_worker.setdefault(int(state.get("worker", rank)), state)  # ranks of one worker have the same
    states = [by_worker[worker] for worker in sorted(by_worker)]
    if len(first["active"]) not in (0, len(states)):
        raise UsageError(f"dense states of {len(states)} workers are given but {len(first['active'])} workers wrote them")
    late = len(first.get("late_x", ())) > 0
    active = [i for i, on in enumerate(first["active"]) if on] or list(range(len(states)))
    stepped = [i for i, state in enumerate(states) if int(state["t"]) > 0] or list(range(len(states)))
    return {"x": _mean([state["x"] + (state["late_x"] - state["late_own"]) if late else state["x"]
                       for state in (states[i] for i in active)]),
            "m": _mean([states[i]["m"] for i in stepped]), "v": _mean([states[i]["v"] for i in stepped]),
            "t": np.array(max(int(state["t"]) for state in states)),
            "vhat": (first["late_vhat"] if late else first["vhat"]).copy(),
            "has_vhat": np.array(late or bool(first["has_vhat"])),
            "global_step": np.array(int(first["global_step"])), "active": np.zeros(0, bool)}


def _mean(arrays: list[np.ndarray]) -> np.ndarray:
    total = np.zeros(arrays[0].shape, np.float64)
    for array in arrays:
        total += array
    return (total / len(arrays)).astype(arrays[0].dtype)
