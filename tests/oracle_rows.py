"""The oracle's settings and its rows: optimizers, replicas, owners and the merge between replicas."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RowDict = dict[int, tuple[np.ndarray, np.ndarray, int]]


@dataclass(frozen=True)
class Options:
    """Everything a simulated run needs beside its data.

    replica: "world" (all workers are one replica), "rank" (each its own) or a partition as lists of ranks.
    dim, first_order: a row's x is ``[vector of dim | one first-order weight if first_order]``.
    dense: "kstep" or "sync"; mode, guard, bias_correction, k only act on "kstep".
    rule: "mass", or for comparison "mean" (over touchers), "mean_all" (over all replicas), "sum".
    window: "full", or "x": merges inside a pass move x alone; state and t follow at the end of the pass.
    overlap: a merge is applied a step after it began, as a correction of what each worker has become meanwhile.
    k_start, grow_steps, warmup_steps: see merges_after. dense_groups: ranks that step as one, with the mean gradient
    over their samples; None: every rank by itself.
    ties: how the merged step count rounds a half: "up" or "even".
    """

    workers: int
    replica: str | list[list[int]] = "world"
    dtype: str = "float64"
    dim: int = 4
    first_order: bool = False
    row_optimizer: str = "adam"
    row_lr: float = 0.01
    row_betas: tuple[float, float] = (0.9, 0.999)
    row_eps: float = 1e-8
    k_rows: int = 20
    rule: str = "mass"
    window: str = "full"
    ties: str = "up"
    dense: str = "kstep"
    dense_lr: float = 0.001
    dense_betas: tuple[float, float] = (0.9, 0.999)
    dense_eps: float = 1e-8
    k: int = 20
    mode: str = "adam"
    guard: bool = True
    bias_correction: bool = True
    overlap: bool = False
    k_start: int = 1
    grow_steps: int = 0
    warmup_steps: int = 0
    dense_groups: list[list[int]] | None = None

    def merges_after(self, step: int) -> bool:
        """Whether the dense part is merged after global step ``step``: k doubles every grow_steps from k_start on."""
        after = step - self.warmup_steps
        if after <= 0:
            return True
        return step % (min(self.k, self.k_start << (after - 1) // self.grow_steps) if self.grow_steps else self.k) == 0

    @property
    def width(self) -> int:
        """Numbers in a row's x."""
        return self.dim + int(self.first_order)

    @property
    def state_width(self) -> int:
        """Numbers in a row's optimizer state: m and v, or one accumulator."""
        return 2 * self.width if self.row_optimizer == "adam" else 1

    def groups(self) -> list[list[int]]:
        """The replicas as lists of ranks, each ascending, ordered by first rank."""
        if self.replica == "world":
            return [list(range(self.workers))]
        if self.replica == "rank":
            return [[rank] for rank in range(self.workers)]
        groups = sorted(sorted(group) for group in self.replica)
        if sorted(sum(groups, [])) != list(range(self.workers)):
            raise ValueError(f"{self.replica} is not a partition of {self.workers} workers")
        return groups


class Rows:
    """Records of some keys: x [n, width], state [n, state_width], t int64 [n], in the order of ``keys``."""

    def __init__(self, keys: np.ndarray, x: np.ndarray, state: np.ndarray, t: np.ndarray):
        self.keys, self.x, self.state, self.t = keys, x, state, t

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(position of every key, whether it is here); ``self.keys`` must be sorted."""
        at = np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))
        return (at, self.keys[at] == keys) if len(self.keys) else (at, np.zeros(len(keys), bool))


def step_rows(rows: Rows, at: np.ndarray, grad: np.ndarray, opt: Options) -> None:
    """One optimizer step on the rows at the distinct positions ``at`` with one summed gradient each."""
    rows.t[at] += 1
    x, state = rows.x[at], rows.state[at]
    if opt.row_optimizer == "adam":
        b1, b2 = opt.row_betas
        w = opt.width
        t = rows.t[at].astype(np.float64)[:, None]
        m = b1 * state[:, :w] + (1 - b1) * grad
        v = b2 * state[:, w:] + (1 - b2) * grad * grad
        m_hat = m / (1 - b1 ** t).astype(x.dtype)
        v_hat = v / (1 - b2 ** t).astype(x.dtype)
        rows.x[at] = x - opt.row_lr * m_hat / (np.sqrt(v_hat) + opt.row_eps)
        rows.state[at] = np.concatenate([m, v], axis=1)
    elif opt.row_optimizer == "rowwise_adagrad":
        acc = state + (grad * grad).mean(axis=1, keepdims=True)
        rows.x[at] = x - opt.row_lr * grad / (np.sqrt(acc) + opt.row_eps)
        rows.state[at] = acc
    else:
        raise ValueError(f"no row optimizer {opt.row_optimizer}")


class Replica:
    """A group of workers with one working copy of the pass's rows."""

    def __init__(self, ranks: list[int], keys: np.ndarray, owners: "Owners"):
        self.ranks = ranks
        self.rows = owners.read(keys)
        self.touches = np.zeros(len(keys), np.int64)  # steps since the last row merge that touched the row
        self.state_touches = np.zeros(len(keys), np.int64)  # the same since state and t were merged

    def step(self, keys: np.ndarray, grads: np.ndarray, opt: Options) -> None:
        """Sum ``grads`` [n, width] over equal ``keys`` [n] and step each distinct row once."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        summed = np.zeros((len(distinct), opt.width), grads.dtype)
        np.add.at(summed, inverse, grads)
        at, here = self.rows.find(distinct)
        assert here.all(), "a batch holds a key that its pass did not announce"
        step_rows(self.rows, at, summed, opt)
        self.touches[at] += 1
        self.state_touches[at] += 1


class Owners:
    """The rows between passes: whatever exists, with creation from ``keys_init``."""

    def __init__(self, keys_init: Callable[[np.ndarray], np.ndarray], opt: Options):
        self.rows: RowDict = {}
        self.keys_init = keys_init
        self.opt = opt

    def read(self, keys: np.ndarray) -> Rows:
        """The rows of sorted distinct ``keys``; the ones that do not exist are created first."""
        dtype, width = np.dtype(self.opt.dtype), self.opt.width
        new = np.array([k for k in keys.tolist() if k not in self.rows], np.uint64)
        if len(new):
            first = np.asarray(self.keys_init(new)).astype(dtype).reshape(len(new), width)
            for key, x in zip(new.tolist(), first):
                self.rows[key] = (x.copy(), np.zeros(self.opt.state_width, dtype), 0)
        found = [self.rows[k] for k in keys.tolist()]
        return Rows(keys, np.array([r[0] for r in found], dtype).reshape(len(keys), width),
                    np.array([r[1] for r in found], dtype).reshape(len(keys), self.opt.state_width),
                    np.array([r[2] for r in found], np.int64))

    def write(self, rows: Rows) -> None:
        """Take rows back."""
        for i, key in enumerate(rows.keys.tolist()):
            self.rows[key] = (rows.x[i].copy(), rows.state[i].copy(), int(rows.t[i]))


def effective_updates(touches: np.ndarray, window: int, rule: str) -> np.ndarray:
    """U of every row: how many of the A = sum a_i updates the merged row counts for.

    touches: int64 [replicas, n], a_i <= window. Returns float64 [n]; 0 where nobody touched the row.
    """
    a = touches.astype(np.float64)
    total = a.sum(axis=0)
    if rule == "mass":
        untouched = np.ones(a.shape[1])
        for row in a:                                       # in replica order
            untouched = untouched * (1 - row / window)
        return np.minimum(total, np.maximum(a.max(axis=0), window * (1 - untouched)))
    if rule == "mean":
        return total / np.maximum((touches > 0).sum(axis=0), 1)
    if rule == "mean_all":
        return total / len(a)
    if rule == "sum":
        return total
    raise ValueError(f"no merge rule {rule}")


def rounded(u: np.ndarray, ties: str) -> np.ndarray:
    """u [n] to whole numbers.

    U comes from float64 arithmetic, so a half on paper may lie an ulp beside itself: W = 20 and touches 5 and 2
    give 6.499999999999999 for 6.5. The margin takes such a value for the half that it is.
    """
    return (np.floor(u + 0.5 + 1e-9) if ties == "up" else np.rint(u)).astype(np.int64)


def merged_moment(beta: float, u: np.ndarray, touches: np.ndarray, ref: np.ndarray, values: list[np.ndarray],
                  clip: bool) -> np.ndarray:
    """Moment of the merged row after u updates: what the touchers added to ``ref``, per unit of forgetting.

    u: int64 [n]; touches: int64 [replicas, n]; ref and every one of values: [n, width]. Rows without a
    touch are
    not looked at (their result is meaningless).
    """
    added = np.zeros_like(ref)
    weight = np.zeros(len(u))
    for a, value in zip(touches, values):           # in replica order; an untouched row adds 0 and weighs 0
        kept = beta ** a.astype(np.float64)
        term = value - kept.astype(ref.dtype)[:, None] * ref
        term[a == 0] = 0
        added += np.maximum(term, 0) if clip else term
        weight += 1 - kept
    weight[weight == 0] = 1
    kept = beta ** u.astype(np.float64)
    return kept.astype(ref.dtype)[:, None] * ref + ((1 - kept) / weight).astype(ref.dtype)[:, None] * added


def merge_rows(replicas: list[Replica], ref: Rows, window: int, opt: Options, state_window: int | None = None) -> None:
    """Merge the shared rows (the keys of ``ref``, their state at the last merge); every holder and ref reload.

    state_window: steps since state and t were merged; None leaves them alone, and then holders and ref take x only.
    """
    n, w = len(ref.keys), opt.width
    held = [replica.rows.find(ref.keys) for replica in replicas]
    touches, state_touches = np.zeros((2, len(replicas), n), np.int64)
    xs, states, ts = [], [], []
    for r, (replica, (at, here)) in enumerate(zip(replicas, held)):
        x, state, t = ref.x.copy(), ref.state.copy(), ref.t.copy()
        at = at[here]
        x[here], state[here], t[here] = replica.rows.x[at], replica.rows.state[at], replica.rows.t[at]
        touches[r, here], state_touches[r, here] = replica.touches[at], replica.state_touches[at]
        xs.append(x), states.append(state), ts.append(t)

    _, share = _updates(touches, window, opt, ref.x.dtype)
    merged = ref.x + share * sum(x_i - ref.x for x_i in xs)
    _take(ref.x, merged, xs, touches, opt)
    if state_window is not None:
        u_int, share = _updates(state_touches, state_window, opt, ref.x.dtype)
        if opt.row_optimizer == "adam":
            b1, b2 = opt.row_betas
            m = merged_moment(b1, u_int, state_touches, ref.state[:, :w], [s[:, :w] for s in states], clip=False)
            v = merged_moment(b2, u_int, state_touches, ref.state[:, w:], [s[:, w:] for s in states], clip=True)
            merged = np.concatenate([m, v], axis=1)
        else:
            merged = ref.state + share * sum(s_i - ref.state for s_i in states)
        _take(ref.state, merged, states, state_touches, opt)
        _take(ref.t, ref.t + u_int, ts, state_touches, opt)
    for replica, (at, here) in zip(replicas, held):
        at, rows = at[here], replica.rows
        rows.x[at] = ref.x[here]
        replica.touches[at] = 0
        if state_window is not None:
            rows.state[at], rows.t[at] = ref.state[here], ref.t[here]
            replica.state_touches[at] = 0


def _updates(touches: np.ndarray, window: int, opt: Options, dtype) -> tuple[np.ndarray, np.ndarray]:
    """(U rounded [n], U/A [n, 1]) of the rule."""
    u = effective_updates(touches, window, opt.rule)
    return rounded(u, opt.ties), (u / np.maximum(touches.sum(axis=0), 1)).astype(dtype)[:, None]


def _take(ref: np.ndarray, merged: np.ndarray, copies: list[np.ndarray], touches: np.ndarray, opt: Options) -> None:
    """Put ``merged`` [n, ..] into ``ref`` where anybody stepped; one toucher: its row as it is, bit for bit."""
    if opt.rule != "mean_all":
        for copy, mine in zip(copies, touches):
            only = (mine > 0) & ((touches > 0).sum(axis=0) == 1)
            merged[only] = copy[only]
    moved = touches.sum(axis=0) > 0
    ref[moved] = merged[moved]
