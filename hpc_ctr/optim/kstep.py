"""k-step Adam: workers step alone and average parameters and second moments every k steps.

The method is that of "Communication-Efficient TeraByte-Scale Model Training Framework for Online Advertising"
(arXiv 2201.05500) and of local AMSGrad, "Toward Communication Efficient Adaptive Gradient Method" (arXiv
2109.05109); docs/kstep.md describes what is computed here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from hpc_ctr.comm.allreduce import Allreduce, SerialAllreduce
from hpc_ctr.errors import UsageError
from hpc_ctr.optim.flat import LATE_KEYS, FlatOptimizer, Param, first_bad
from hpc_ctr.optim.schedule import merge_is_due

MODES = ("adam", "amsgrad")


class KStepAdam(FlatOptimizer):
    """Adam with local steps and a merge whenever the global step is a multiple of k.

    Every step, on a worker with samples::

        t += 1;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  c = v / (1-b2^t)
        d = max(c, vhat) with guard, vhat without; c before the first merge
        x -= lr * (m / (1-b1^t)) / (sqrt(d) + eps)

    Without bias_correction the factors 1/(1-b^t) are 1. A merge, over the workers that stepped since the last
    one: ``vhat = mean(c)`` (mode adam) or ``max(vhat, mean(c))`` (amsgrad); ``x = mean(x)`` on every worker,
    the same bits; m, v and t stay local. It hands exactly 2 * merged_bytes to one ``merger.sum_`` under the
    name "dense_merge". k counts global steps; k_start, grow_steps and warmup let it grow (see optim/schedule.py).

    overlap: a merge begins after its step, goes on beside the next one, and is applied after that as a correction,
    ``x += mean(x) - x``, both as they were when it began, and the new vhat with it.

    inside: sums over the ranks of this rank's worker, where several ranks are one worker (they take the same steps with
    the mean gradient over their samples); members: the ranks of every worker. One worker is one rank otherwise.

    Raises UsageError for settings that are not possible; DataError on all ranks in a merge when x or c is not finite on
    one of them, naming it.
    """

    def __init__(self, params: Iterable[Param], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, k: int = 20,
                 mode: str = "adam", guard: bool = True, bias_correction: bool = True,
                 merger: Allreduce | None = None, *, k_start: int = 1, grow_steps: int = 0, warmup: int = 0,
                 overlap: bool = False, inside: Allreduce | None = None, members: list[list[int]] | None = None) -> None:
        if k < 1:
            raise UsageError(f"merge.k: must be at least 1, not {k}")
        if mode not in MODES:
            raise UsageError(f"merge.mode: must be one of {', '.join(MODES)}, not {mode!r}")
        super().__init__(params, lr, betas, eps, merger or SerialAllreduce())
        self.k = k
        self.mode = mode
        self.guard = guard
        self.bias_correction = bias_correction
        self.k_start, self.grow_steps, self.warmup = k_start, grow_steps, warmup
        self.overlap = overlap
        self.inside = inside or SerialAllreduce()
        self.members = members or self.members
        self.vhat = torch.zeros_like(self.x)
        self.has_vhat = False
        self._active = np.zeros(self.workers, bool)
        self._late: _Late | None = None
        # Division by a tensor on the device is a true division everywhere; by a Python number, a GPU
        # multiplies with the rounded reciprocal, and N = 3 would then move x a little at every merge.
        self._counts = torch.arange(self.workers + 1, dtype=self.x.dtype, device=self.x.device)

    @torch.no_grad()
    def step(self, samples: np.ndarray | None = None) -> bool:  # type: ignore[override]
        """Take the global step: a local step if this worker had samples, and a merge when it is due.

        samples: int or bool [ranks], samples of every rank in this step, the same array on all of them; None
        means that all had equally many. A worker without samples keeps x, m, v and t. Collective when a merge is due.
        Returns True when a merge took place, or began.
        """
        counts = self._samples(samples)
        here = np.array([counts[group].sum() for group in self.members])
        self.global_step += 1
        if here[self.rank]:
            self._local_step(self._gradient(counts))
        self._active |= here > 0
        if self._late:
            self._correct()
        if not merge_is_due(self.global_step, self.k, self.k_start, self.grow_steps, self.warmup):
            return False
        return self._begin() if self.overlap else self.merge()

    @torch.no_grad()
    def merge(self) -> bool:
        """Average over the workers that stepped since the last merge. Collective. False when there was none.

        All workers know from the shared sample counts who is active, so nothing travels to find out. A merge that is
        under way is applied first.
        """
        if self._late:
            self._correct()
        if not self._active.any():
            return False
        bad = self._share(self.x, self._work)
        self.merger.sum_([self.flat.x_and_work], "dense_merge")
        self.stop_unless_finite(self.flat.x_and_work, bad, self.merger)
        self._take_vhat(self._work)
        return True

    def _share(self, x: torch.Tensor, cbar: torch.Tensor) -> dict[str, int]:
        """This worker's part of the means: x divided in place, c into ``cbar``. Returns what was not finite in it."""
        count = int(self._active.sum())
        bad = {"value": 0, "second moment": 0}
        if self._active[self.rank]:
            torch.div(self._second_moment(), self._counts[count], out=cbar)
            bad = {"value": first_bad(x), "second moment": first_bad(cbar)}
            x.div_(self._counts[count])
        else:
            x.zero_()
            cbar.zero_()
        self._active[:] = False
        self.merges += 1
        return bad

    def _take_vhat(self, cbar: torch.Tensor) -> None:
        if self.mode == "amsgrad":
            torch.maximum(self.vhat, cbar, out=self.vhat)
        else:
            self.vhat.copy_(cbar)
        self.has_vhat = True

    def _begin(self) -> bool:
        """Begin a merge that goes on beside the next step. False when nobody stepped since the last one."""
        if not self._active.any():
            return False
        own = self.x.clone()
        means = torch.cat([own, own])
        bad = self._share(means[:len(own)], means[len(own):])
        self._late = _Late(own, means, bad, self.merger.start_([means], "dense_merge"))
        return True

    def _correct(self) -> None:
        """Apply the merge that is under way."""
        late, self._late = self._late, None
        late.wait()
        self.stop_unless_finite(late.means, late.bad, self.merger)
        if self._active.any():
            self.x.add_(late.correction())
        else:  # the same, but for rounding: where nobody has stepped since, x becomes the same bits everywhere
            self.x.copy_(late.mean)
        self._take_vhat(late.cbar)

    @torch.no_grad()
    def finish(self) -> bool:
        """Apply a merge that is under way, and merge once more if any worker stepped since. Collective. True when x
        is the same bits on all workers only since then."""
        late = self._late is not None
        if late:
            self._correct()
        return self.merge() or late

    @torch.no_grad()
    def averaged_x(self) -> torch.Tensor:
        """x [P] as a merge would leave it now, in a new array; training is not touched. Collective.

        The sum is named "eval". Where no worker stepped since the last merge all x are equal, or will be when it is
        applied; nothing travels.
        """
        mean = self.x.clone()
        if self._late:
            self._late.wait()
            mean = self._late.mean.clone() if not self._active.any() else mean.add_(self._late.correction())
        count = int(self._active.sum())
        if count:
            mean.div_(self._counts[count]) if self._active[self.rank] else mean.zero_()
            self.merger.sum_([mean], "eval")
        return mean

    def worker_state(self) -> dict[str, np.ndarray]:
        """See FlatOptimizer.worker_state. Waits for a merge that is under way, and does not apply it."""
        state = super().worker_state()
        if self.has_vhat:
            state["vhat"] = self.vhat.cpu().numpy().copy()
        if self._late:
            self._late.wait()
            vhat = torch.maximum(self.vhat, self._late.cbar) if self.mode == "amsgrad" else self._late.cbar
            state |= {"late_x": self._late.mean.cpu().numpy().copy(), "late_own": self._late.own.cpu().numpy().copy(),
                      "late_vhat": vhat.cpu().numpy().copy()}
        return state | {"has_vhat": np.array(self.has_vhat), "active": self._active.copy()}

    @torch.no_grad()
    def load_worker_state(self, state: dict[str, np.ndarray]) -> None:
        """See FlatOptimizer.load_worker_state."""
        active = np.asarray(state.get("active", ()), bool)
        if len(active) not in (0, self.workers):
            raise UsageError(f"the dense state was saved by {len(active)} workers and there are "
                             f"{self.workers}; combine the states first")
        super().load_worker_state(state)
        self._active[:] = active if len(active) else False
        self.has_vhat = bool(state["has_vhat"])
        self.vhat.zero_()
        if self.has_vhat:
            self.vhat.copy_(torch.from_numpy(np.asarray(state["vhat"])))
        self._late = None
        if len(state.get("late_x", ())):
            mean, own, vhat = (torch.from_numpy(np.array(state[name])).to(self.x) for name in LATE_KEYS)
            self._late = _Late(own, torch.cat([mean, vhat]), {"value": 0, "second moment": 0}, lambda: None)

    def _second_moment(self) -> torch.Tensor:
        """c [P]: in ``_work``, or v itself where nothing is corrected."""
        if not self.bias_correction:
            return self.v
        return torch.div(self.v, 1 - self.param_groups[0]["betas"][1] ** self.t, out=self._work)

    def _gradient(self, counts: np.ndarray) -> torch.Tensor:
        """The gradient [P] of the mean loss over the samples of this worker's ranks."""
        grad = self.flat.gather_grad()
        if self.inside.size > 1:
            mine = counts[self.members[self.rank]]
            share = float(mine[self.inside.rank] / mine.sum())
            grad.mul_(share) if share else grad.zero_()
            bad = {"gradient": first_bad(grad)}
            self.inside.sum_([grad], "dense_grad")
            self.stop_unless_finite(grad, bad, self.inside)
        return grad

    def _local_step(self, grad: torch.Tensor) -> None:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        self.t += 1
        self.m.lerp_(grad, 1 - beta1)
        self.v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        work = self._work
        if not self.has_vhat:
            torch.sqrt(self._second_moment(), out=work)
        elif self.guard:
            torch.maximum(self._second_moment(), self.vhat, out=work).sqrt_()
        else:
            torch.sqrt(self.vhat, out=work)
        rate = group["lr"] / (1 - beta1 ** self.t) if self.bias_correction else group["lr"]
        self.x.addcdiv_(self.m, work.add_(group["eps"]), value=-rate)


@dataclass
class _Late:
    """A merge under way: this worker's x [P] when it began; the means [2P] of x and c, once ``wait`` has returned."""

    own: torch.Tensor
    means: torch.Tensor
    bad: dict[str, int]
    wait: Callable[[], None]

    @property
    def mean(self) -> torch.Tensor:
        return self.means[:len(self.own)]

    @property
    def cbar(self) -> torch.Tensor:
        return self.means[len(self.own):]

    def correction(self) -> torch.Tensor:
        """What is added to x, [P]."""
        return self.mean - self.own
