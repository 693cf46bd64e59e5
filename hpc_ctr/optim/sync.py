"""Synchronous Adam: the gradients of all workers are summed in every step, as on one big worker."""

from collections.abc import Iterable

import numpy as np
import torch

from hpc_ctr.comm.allreduce import Allreduce, SerialAllreduce
from hpc_ctr.errors import UsageError
from hpc_ctr.optim.flat import FlatOptimizer, Param, first_bad


class SyncAdam(FlatOptimizer):
    """Adam (arXiv 1412.6980) with the formula of torch.optim.Adam, on the gradients of all workers.

    Each worker brings the gradient of the mean loss over its own B_r samples; the step uses the sum of
    (B_r / B) g_r, B = sum of B_r, which is the gradient of the mean loss over all samples. x, m and v are the
    same bits on every worker. A step hands merged_bytes to one ``merger.sum_`` under the name "dense_grad".
    """

    def __init__(self, params: Iterable[Param], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 merger: Allreduce | None = None) -> None:
        super().__init__(params, lr, betas, eps, merger or SerialAllreduce())

    @torch.no_grad()
    def step(self, samples: np.ndarray | None = None) -> bool:  # type: ignore[override]
        """Sum the gradients over the workers and take an Adam step with them. Collective.

        samples: int [N], samples of every worker in this step, the same array on all of them; None means that
        all had equally many. The gradients are overwritten by the summed one. Where no worker had samples
        nothing travels and nothing changes. Returns True when gradients were exchanged. Raises DataError on all
        workers when a gradient is not finite on one.
        """
        counts = self._samples(samples)
        self.global_step += 1
        total = int(counts.sum())
        if total == 0:
            return False
        grad = self.flat.gather_grad()
        if counts[self.rank]:
            grad.mul_(float(counts[self.rank] / total))
        else:
            grad.zero_()
        bad = {"gradient": first_bad(grad)}
        self.merger.sum_([grad], "dense_grad")
        self.stop_unless_finite(grad, bad, self.merger)
        self.merges += 1
        self._adam(grad)
        return True

    def load_worker_state(self, state: dict[str, np.ndarray]) -> None:
        """See FlatOptimizer.load_worker_state; a state of KStepAdam in the middle of a window is refused."""
        if np.any(state.get("active", False)) or len(state.get("late_x", ())):
            raise UsageError("the dense state is of workers between two merges, each with its own "
                             "parameters; combine the states first")
        super().load_worker_state(state)

    def _adam(self, grad: torch.Tensor) -> None:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        self.t += 1
        self.m.lerp_(grad, 1 - beta1)
        self.v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = torch.sqrt(self.v, out=self._work).div_((1 - beta2 ** self.t) ** 0.5).add_(group["eps"])
        self.x.addcdiv_(self.m, root, value=-group["lr"] / (1 - beta1 ** self.t))
