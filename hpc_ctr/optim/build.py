"""The dense optimizer that a job file asks for."""

from collections.abc import Iterable

import torch

from hpc_ctr.comm.allreduce import Allreduce
from hpc_ctr.optim.flat import FlatOptimizer
from hpc_ctr.optim.kstep import KStepAdam
from hpc_ctr.optim.options import DenseOptions, MergeOptions
from hpc_ctr.optim.sync import SyncAdam


def make_dense_optimizer(params: Iterable[torch.nn.Parameter], dense: DenseOptions, merge: MergeOptions,
                         merger: Allreduce) -> FlatOptimizer:
    """KStepAdam or SyncAdam over ``params`` as the sections ``dense`` and ``merge`` say."""
    betas = (dense.beta1, dense.beta2)
    if merge.dense == "sync":
        return SyncAdam(params, dense.lr, betas, dense.eps, merger)
    return KStepAdam(params, dense.lr, betas, dense.eps, merge.k, merge.mode, merge.guard,
                     merge.bias_correction, merger)
