"""The dense optimizer that a job file asks for, and the sums over ranks that it takes."""

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_ctr.comm.allreduce import Allreduce, MpiAllreduce, SerialAllreduce, make_allreduce
from hpc_ctr.comm.hierarchy import HierarchicalAllreduce, RailAllreduce
from hpc_ctr.comm.session import Session
from hpc_ctr.comm.trace import Trace
from hpc_ctr.optim.flat import FlatOptimizer, Param
from hpc_ctr.optim.kstep import KStepAdam
from hpc_ctr.optim.options import DenseOptions, MergeOptions
from hpc_ctr.optim.sync import SyncAdam


@dataclass
class Mergers:
    """between: sums over workers; inside: over the ranks of this rank's worker; members: the ranks of each worker."""

    between: Allreduce
    inside: Allreduce
    members: list[list[int]]

    @property
    def seconds(self) -> float:
        """Wall time spent in sums so far."""
        return self.between.seconds + self.inside.seconds

    def payload(self) -> dict[str, int]:
        """Bytes handed in so far, by purpose."""
        return dict(self.between.bytes_by_name + self.inside.bytes_by_name)


def make_mergers(merge: MergeOptions, session: Session, trace: Trace) -> Mergers:
    """What the section ``merge`` asks for, on the nodes of ``session``. Collective. Raises UsageError."""
    comm, nodes = session.comm, session.nodes
    alone: Allreduce = SerialAllreduce()
    if merge.dense == "kstep" and merge.dense_workers == "node":
        mine = next(number for number, node in enumerate(nodes) if session.rank in node)
        inside = MpiAllreduce(comm.Split(mine, session.rank), trace=trace, ranks=nodes[mine])
        return Mergers(RailAllreduce(comm, nodes, trace=trace), inside, nodes)
    several = len(nodes) > 1 and max(len(node) for node in nodes) > 1
    by_nodes = several and merge.backend != "horovod" if merge.route == "auto" else merge.route == "nodes"
    between = HierarchicalAllreduce(comm, nodes, trace=trace) if by_nodes else make_allreduce(merge.backend, comm, trace)
    return Mergers(between, alone, [[rank] for rank in range(session.size)])


def make_dense_optimizer(params: Iterable[Param], dense: DenseOptions, merge: MergeOptions,
                         mergers: Mergers | Allreduce) -> FlatOptimizer:
    """KStepAdam or SyncAdam over ``params`` as the sections ``dense`` and ``merge`` say."""
    if isinstance(mergers, Allreduce):
        mergers = Mergers(mergers, SerialAllreduce(), [[rank] for rank in range(mergers.size)])
    betas = (dense.beta1, dense.beta2)
    if merge.dense == "sync":
        return SyncAdam(params, dense.lr, betas, dense.eps, mergers.between)
    return KStepAdam(params, dense.lr, betas, dense.eps, merge.k, merge.mode, merge.guard, merge.bias_correction,
                     mergers.between, k_start=merge.k_start, grow_steps=merge.grow_steps, warmup=merge.warmup_steps,
                     overlap=merge.overlap, inside=mergers.inside, members=mergers.members)
