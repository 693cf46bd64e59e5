"""k-step Adam: workers step alone and average parameters and second moments every k steps.

The method is that of "Communication-Efficient TeraByte-Scale Model Training Framework for Online Advertising"
(arXiv 2201.05500) and of local AMSGrad, "Toward Communication Efficient Adaptive Gradient Method" (arXiv
2109.05109); docs/kstep.md describes what is computed here.
"""

from collections.abc import Iterable

import numpy as np
import torch

from hpc_ctr.comm.allreduce import Allreduce, SerialAllreduce
from hpc_ctr.errors import UsageError
from hpc_ctr.optim.flat import FlatOptimizer

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
    name "dense_merge". k counts global steps. Raises UsageError for settings that are not possible.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, k: int = 20,
                 mode: str = "adam", guard: bool = True, bias_correction: bool = True,
                 merger: Allreduce | None = None) -> None:
        if k < 1:
            raise UsageError(f"merge.k: must be at least 1, not {k}")
        if mode not in MODES:
            raise UsageError(f"merge.mode: must be one of {', '.join(MODES)}, not {mode!r}")
        super().__init__(params, lr, betas, eps, merger or SerialAllreduce())
        self.k = k
        self.mode = mode
        self.guard = guard
        self.bias_correction = bias_correction
        self.vhat = torch.zeros_like(self.x)
        self.has_vhat = False
        self._active = np.zeros(self.workers, bool)
        # Division by a tensor on the device is a true division everywhere; by a Python number, a GPU
        # multiplies with the rounded reciprocal, and N = 3 would then move x a little at every merge.
        self._counts = torch.arange(self.workers + 1, dtype=self.x.dtype, device=self.x.device)

    @torch.no_grad()
    def step(self, samples: np.ndarray | None = None) -> bool:  # type: ignore[override]
        """Take the global step: a local step if this worker had samples, and a merge when it is due.

        samples: int or bool [N], samples of every worker in this step, the same array on all of them; None
        means that all had some. A worker without samples keeps x, m, v and t. Collective when a merge is due.
        Returns True when a merge took place.
        """
        had = np.ones(self.workers, bool) if samples is None else np.asarray(samples) > 0
        if had.shape != (self.workers,):
            raise ValueError(f"step: samples must have one entry for each of {self.workers} workers, "
                             f"not shape {had.shape}")
        self.global_step += 1
        if had[self.rank]:
            self._local_step()
        self._active |= had
        return self.merge() if self.global_step % self.k == 0 else False

    @torch.no_grad()
    def merge(self) -> bool:
        """Average over the workers that stepped since the last merge. Collective. False when there was none.

        All workers know from the shared sample counts who is active, so nothing travels to find out.
        """
        count = int(self._active.sum())
        if count == 0:
            return False
        cbar = self._work
        if self._active[self.rank]:
            cbar.copy_(self._second_moment())
            self.x.div_(self._counts[count])
            cbar.div_(self._counts[count])
        else:
            self.x.zero_()
            cbar.zero_()
        self.merger.sum_([self.x, cbar], "dense_merge")
        if self.mode == "amsgrad":
            torch.maximum(self.vhat, cbar, out=self.vhat)
        else:
            self.vhat.copy_(cbar)
        self.has_vhat = True
        self._active[:] = False
        self.merges += 1
        return True

    def finish(self) -> bool:
        """Merge once more if any worker stepped since the last merge. Collective. True when one did."""
        return self.merge()

    @torch.no_grad()
    def averaged_x(self) -> torch.Tensor:
        """x [P] as a merge would leave it now, in a new array; training is not touched. Collective.

        The sum is named "eval". Where no worker stepped since the last merge all x are equal; nothing
        travels.
        """
        mean = self.x.clone()
        count = int(self._active.sum())
        if count:
            mean.div_(self._counts[count]) if self._active[self.rank] else mean.zero_()
            self.merger.sum_([mean], "eval")
        return mean

    def worker_state(self) -> dict[str, np.ndarray]:
        """See FlatOptimizer.worker_state."""
        state = super().worker_state()
        if self.has_vhat:
            state["vhat"] = self.vhat.cpu().numpy().copy()
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

    def _second_moment(self) -> torch.Tensor:
        """c [P]: in ``_work``, or v itself where nothing is corrected."""
        if not self.bias_correction:
            return self.v
        return torch.div(self.v, 1 - self.param_groups[0]["betas"][1] ** self.t, out=self._work)

    def _local_step(self) -> None:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        grad = self.flat.gather_grad()
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
