"""The reference that training is measured against: N simulated workers in one process, one after the other.

Written for reading, from the definitions of the method alone; it shares no code with the optimizers,
exchanges or
merges of ``hpc_ctr`` (only the ``Batch`` type). Loops run over workers; inside a worker everything is
numpy, and
torch does nothing but the model's own forward and backward.

What a step is, for the global step s = 1, 2, ..., and in this order:

1. every worker with samples predicts them with its own dense parameters and its replica's rows;
2. rows: each replica takes one optimizer step on every distinct key that its workers' batches of the step
contain
   (gradient of the mean loss over the replica's samples, summed over all occurrences of the key);
3. dense: every worker takes a local step on the mean loss of its own samples (``kstep``), or all take the
same
   Adam step on the mean loss of all samples (``sync``);
4. dense merge when s is a multiple of k, or s is the last step of all;
5. row merge of the rows shared in this pass when s is a multiple of k_rows, or ends a pass.

Scalars (beta powers, bias corrections, merge weights) are float64 and only their value is cast to the
run's dtype:
``1 - beta2**t`` taken in float32 would be off by 5e-5 at t = 1.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as functional
from oracle_lifecycle import Lifecycle
from oracle_rows import Options, Owners, Replica, RowDict, Rows, merge_rows

from hpc_ctr.data.batch import Batch


@dataclass
class Result:
    """What a simulated run leaves.

    losses: float64 [steps, workers], mean over the worker's samples of the step, NaN where it had none.
    logits: logits[step][rank], float [samples], predicted before the step learned from them.
    dense: one dict a worker: x, m, v (flat, in the order of ``model.parameters()``), t (its local steps).
    vhat: flat, the shared second moment; None before the first merge and with dense sync.
    rows: after each pass, every row that exists: key -> (x [width], state [state_width], t).
    dense_merges, row_merges: how often each happened.
    """

    losses: np.ndarray
    logits: list[list[np.ndarray]]
    dense: list[dict]
    vhat: np.ndarray | None
    rows: list[RowDict]
    dense_merges: int
    row_merges: int
    pass_ends: list[int] = field(default_factory=list)


# ---------------------------------------------------------------- dense part


class Worker:
    """One worker's dense model with its private m, v and step count."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        self.model = deepcopy(model).to(dtype)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.x = np.concatenate([p.detach().reshape(-1).numpy() for p in self.params] or [np.zeros(0)])
        self.m = np.zeros_like(self.x)
        self.v = np.zeros_like(self.x)
        self.t = 0
        self.stepped = False            # since the last dense merge

    def load(self) -> None:
        """Put x into the torch model."""
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.from_numpy(self.x), self.params)

    def moments(self, grad: np.ndarray, betas: tuple[float, float]) -> None:
        """t, m and v of one local step."""
        b1, b2 = betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * grad
        self.v = b2 * self.v + (1 - b2) * grad * grad
        self.stepped = True

    def second_moment(self, opt: Options) -> np.ndarray:
        """c: this worker's own estimate of the squared gradient."""
        return self.v / (1 - opt.dense_betas[1] ** self.t) if opt.bias_correction else self.v

    def first_moment(self, opt: Options) -> np.ndarray:
        """m, bias corrected if the run asks for it."""
        return self.m / (1 - opt.dense_betas[0] ** self.t) if opt.bias_correction else self.m


def kstep_local(worker: Worker, grad: np.ndarray, vhat: np.ndarray | None, opt: Options) -> None:
    """One local step of k-step Adam: no communication, denominator from the last merge."""
    worker.moments(grad, opt.dense_betas)
    c = worker.second_moment(opt)
    if vhat is None:
        d = c
    elif opt.guard:
        d = np.maximum(c, vhat)
    else:
        d = vhat
    worker.x = worker.x - opt.dense_lr * worker.first_moment(opt) / (np.sqrt(d) + opt.dense_eps)


def kstep_means(workers: list[Worker], opt: Options) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean of x and of c over the workers that stepped since the last merge, a group of ranks counting once; None when
    nobody did.
    """
    leaders = [group[0] for group in opt.dense_groups or [[rank] for rank in range(len(workers))]]
    active = [workers[rank] for rank in leaders if workers[rank].stepped]
    if not active:
        return None
    for w in workers:
        w.stepped = False
    return sum(w.x for w in active) / len(active), sum(w.second_moment(opt) for w in active) / len(active)


class DenseMerge:
    """The merges of the dense part. vhat: the shared second moment, None before the first one; done: how many."""

    def __init__(self, workers: list[Worker], opt: Options):
        self.workers, self.opt = workers, opt
        self.vhat: np.ndarray | None = None
        self.done = 0
        self.late: tuple[list[np.ndarray], np.ndarray, np.ndarray] | None = None

    def after_step(self, step: int, last: bool) -> None:
        """What follows global step ``step``: a merge begun a step ago is applied, and one may be due."""
        self.correct()
        if self.opt.overlap and not last:
            if self.opt.merges_after(step) and (means := kstep_means(self.workers, self.opt)):
                self.late = ([w.x.copy() for w in self.workers], *means)
                self.done += 1
        elif (self.opt.merges_after(step) or last) and (means := kstep_means(self.workers, self.opt)):
            for w in self.workers:
                w.x = means[0].copy()
            self.take_vhat(means[1])
            self.done += 1

    def correct(self) -> None:
        """Apply the merge that was begun."""
        if self.late is None:
            return
        (own, mean, cbar), self.late = self.late, None
        for w, before in zip(self.workers, own):
            w.x = w.x + (mean - before)
        self.take_vhat(cbar)

    def take_vhat(self, cbar: np.ndarray) -> None:
        """vhat of the mode."""
        largest = self.opt.mode == "amsgrad" and self.vhat is not None
        self.vhat = np.maximum(self.vhat, cbar) if largest else cbar


def sync_step(workers: list[Worker], grads: list[np.ndarray], counts: list[int], opt: Options) -> None:
    """Every worker takes the Adam step of the gradient of the mean loss over all samples of the step."""
    total = sum(counts)
    if total == 0:
        return
    grad = sum(g * n for g, n in zip(grads, counts)) / total
    b1, b2 = opt.dense_betas
    for w in workers:
        w.moments(grad, opt.dense_betas)
        m, c = w.m / (1 - b1 ** w.t), w.v / (1 - b2 ** w.t)
        w.x = w.x - opt.dense_lr * m / (np.sqrt(c) + opt.dense_eps)


# ---------------------------------------------------------------- the model's forward and backward


def predict_and_differentiate(worker: Worker, batch: Batch, rows: Rows, opt: Options):
    """Forward and backward of one worker on its samples.

    Returns (logits [B], sum of the sample losses, dense gradient of that sum (flat), keys [nnz], gradient
    of that
    sum by each key occurrence [nnz, width]).
    """
    dtype = getattr(torch, opt.dtype)
    bags, count = len(batch.offsets) - 1, batch.size
    fields = bags // count
    at, here = rows.find(batch.keys)
    assert here.all(), "a batch holds a key that its pass did not announce"
    bag_of_key = np.repeat(np.arange(bags), np.diff(batch.offsets))
    pooled = np.zeros((bags, opt.width), np.dtype(opt.dtype))
    np.add.at(pooled, bag_of_key, rows.x[at])
    per_sample = pooled.reshape(fields, count, opt.width).transpose(1, 0, 2).copy()
    embedded = torch.from_numpy(per_sample).requires_grad_(True)              # [B, F, width]
    first = embedded[:, :, opt.dim] if opt.first_order else None

    logits = worker.model(torch.from_numpy(batch.dense).to(dtype), (embedded[:, :, :opt.dim],), first)
    label = torch.from_numpy(batch.label).to(dtype)
    loss_sum = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
    grads = torch.autograd.grad(loss_sum, [*worker.params, embedded], allow_unused=True)
    flat = [(torch.zeros_like(p) if g is None else g).reshape(-1).numpy()
            for p, g in zip(worker.params, grads)]
    by_bag = np.zeros_like(per_sample) if grads[-1] is None else grads[-1].numpy()
    by_bag = by_bag.transpose(1, 0, 2).reshape(bags, opt.width)
    dense_grad = np.concatenate([np.zeros(0, np.dtype(opt.dtype)), *flat])
    logits = logits.detach().numpy().copy()
    return logits, float(loss_sum.detach()), dense_grad, batch.keys, by_bag[bag_of_key]


# ---------------------------------------------------------------- the run


def simulate(batches: Sequence[Sequence[Batch | None]], build_model: Callable[[], torch.nn.Module],
             options: Options, keys_init: Callable[[np.ndarray], np.ndarray],
             pass_ends: Sequence[int] | None = None, lifecycle: Lifecycle | None = None) -> Result:
    """Train N simulated workers.

    batches: ``batches[step][rank]``; a size-0 batch, None or a missing tail entry is a rank without data
    in the step.
    build_model: called once; every worker starts from a copy. ``forward(dense [B, D], (vectors [B, F,
    dim],), first
        [B, F] or None) -> logits [B]``.
    keys_init: uint64 [n] -> [n, width], first value of rows that did not exist.
    pass_ends: ascending global step counts at which passes end; the last step is added when it is missing.
    lifecycle: which keys get rows, and when rows go; left out, every key has a row for ever.
    """
    opt = options
    torch.set_num_threads(1)
    steps = len(batches)
    ends = sorted({int(e) for e in (pass_ends or [])} | ({steps} if steps else set()))
    if ends and (ends[0] < 1 or ends[-1] > steps):
        raise ValueError(f"pass ends {ends} do not fit {steps} steps")
    model = build_model()
    workers = [Worker(model, getattr(torch, opt.dtype)) for _ in range(opt.workers)]
    owners = Owners(keys_init, opt)
    groups = opt.groups()
    result = Result(np.full((steps, opt.workers), np.nan), [], [], None, [], 0, 0, ends)
    merge = DenseMerge(workers, opt)

    start = 0
    batches = list(batches)
    for end in ends:
        if lifecycle is not None:
            batches[start:end] = lifecycle.open_pass(batches[start:end], owners.rows)
        replicas = [Replica(ranks, _keys_of(batches[start:end], ranks), owners) for ranks in groups]
        shared = _shared_keys([replica.rows.keys for replica in replicas])
        ref, last_merge = owners.read(shared), start
        for step in range(start + 1, end + 1):
            _train_step(_step_batches(batches[step - 1], opt.workers), step, workers, replicas, result, opt)
            if opt.dense == "kstep":
                merge.after_step(step, step == steps)
                result.vhat, result.dense_merges = merge.vhat, merge.done
            if len(replicas) > 1 and (step % opt.k_rows == 0 or step == end):
                state_window = step - last_merge if opt.window == "full" else step - start if step == end else None
                merge_rows(replicas, ref, step - last_merge, opt, state_window)
                result.row_merges += 1
                last_merge = step
        for replica in replicas:                            # shared rows are equal on all holders by now
            owners.write(replica.rows)
        if lifecycle is not None:
            lifecycle.close_pass(owners.rows)
        result.rows.append(dict(owners.rows))
        start = end
    result.dense = [{"x": w.x.copy(), "m": w.m.copy(), "v": w.v.copy(), "t": w.t} for w in workers]
    return result


def _train_step(step_batches: list[Batch | None], step: int, workers: list[Worker], replicas: list[Replica],
                result: Result, opt: Options) -> None:
    """Predict, then rows, then dense: everything of one step but the merges."""
    dtype = np.dtype(opt.dtype)
    grads = [np.zeros_like(w.x) for w in workers]           # of the mean loss over the worker's own samples
    counts = [0 if batch is None else batch.size for batch in step_batches]
    logits = [np.zeros(0, dtype) for _ in workers]
    for replica in replicas:
        samples = sum(counts[rank] for rank in replica.ranks)
        keys, by_key = [], []
        for rank in replica.ranks:
            if counts[rank] == 0:
                continue
            workers[rank].load()
            logits[rank], loss, grad, touched, by_occurrence = predict_and_differentiate(
                workers[rank], step_batches[rank], replica.rows, opt)
            result.losses[step - 1, rank] = loss / counts[rank]
            grads[rank] = grad / counts[rank]
            keys.append(touched)
            by_key.append(by_occurrence / samples)
        if keys:
            replica.step(np.concatenate(keys), np.concatenate(by_key), opt)
    result.logits.append(logits)
    if opt.dense == "sync":
        sync_step(workers, grads, counts, opt)
    elif opt.dense == "kstep":
        for group in opt.dense_groups or [[rank] for rank in range(opt.workers)]:
            total = sum(counts[rank] for rank in group)
            if total:
                grad = sum(grads[rank] * (counts[rank] / total) for rank in group)
                for rank in group:
                    kstep_local(workers[rank], grad, result.vhat, opt)
    else:
        raise ValueError(f"no dense mode {opt.dense}")


def _step_batches(step: Sequence[Batch | None], workers: int) -> list[Batch | None]:
    return [step[rank] if rank < len(step) else None for rank in range(workers)]


def _keys_of(steps: Sequence[Sequence[Batch | None]], ranks: list[int]) -> np.ndarray:
    found = [step[rank].keys for step in steps for rank in ranks
             if rank < len(step) and step[rank] is not None]
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))


def _shared_keys(held: list[np.ndarray]) -> np.ndarray:
    keys, holders = np.unique(np.concatenate([np.zeros(0, np.uint64), *held]), return_counts=True)
    return keys[holders >= 2]
