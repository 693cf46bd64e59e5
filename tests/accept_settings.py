"""The settings that training is compared with the oracle in, and the comparison."""

import itertools
from dataclasses import asdict, dataclass

import accept_common
import numpy as np
import oracle

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
# moments are compared relative to their largest entry, which is far below one: a few ulp more in float32
MOMENT_FACTOR = {"float32": 4, "float64": 1}
SEED, INIT_SCALE, DIM = 11, 0.05, 4
STEPS, SAMPLES = 46, 8                      # more than two windows of 20, and no multiple of 3 or 20


@dataclass(frozen=True)
class Setting:
    """One combination to train with."""

    replica: str = "world"
    dense: str = "kstep"
    mode: str = "adam"
    k: int = 3
    k_rows: int = 3
    backend: str = "mpi"
    optimizer: str = "adam"
    dtype: str = "float64"
    case: str = "even"
    batches_per_pass: int = 20
    guard: bool = True
    bias_correction: bool = True
    rule: str = "mass"
    model: str = "accept_common:TinyNet"
    row_lr: float = 0.02
    dense_lr: float = 0.005
    row_eps: float = 1e-8
    dense_eps: float = 1e-8
    betas: tuple = (0.9, 0.999)
    steps: int = STEPS
    window: str = "full"
    overlap: bool = False
    k_start: int = 1
    grow_steps: int = 0
    warmup_steps: int = 0
    route: str = "auto"
    dense_workers: str = "rank"
    ranks_per_node: int = 0

    def nodes(self, ranks: int) -> list[list[int]]:
        """The ranks of every node."""
        per_node = self.ranks_per_node or ranks
        return [list(range(ranks))[i:i + per_node] for i in range(0, ranks, per_node)]

    def replicas(self, ranks: int) -> int:
        """How many copies of a row there may be."""
        return {"world": 1, "rank": ranks, "node": len(self.nodes(ranks))}[self.replica]

    @property
    def name(self) -> str:
        """The settings that differ from the default."""
        default = asdict(Setting())
        return ", ".join(f"{k}={v}" for k, v in asdict(self).items() if v != default[k]) or "default"


CHOICES = {"backend": ("horovod", "mpi"), "optimizer": ("adam", "rowwise_adagrad"),
           "dtype": ("float32", "float64"), "case": accept_common.DATA_CASES,
           "batches_per_pass": (5, 20, 100)}


def grid(ranks: int) -> list[Setting]:
    """Replica, mode, k and k_rows in full; the other settings drawn once and for all."""
    rng = np.random.default_rng(ranks)
    out = []
    full = itertools.product(("world", "rank"), ("adam", "amsgrad"), (1, 3, 20), (1, 3, 20))
    for replica, mode, k, k_rows in full:
        if replica == "world" and k_rows != 3:              # rows of one replica never merge
            continue
        rest = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
        out.append(Setting(replica=replica, mode=mode, k=k, k_rows=k_rows, **rest))
    return out


def more_settings() -> list[Setting]:
    """What the grid leaves out."""
    return [
        # the paper's form, and each half of it
        Setting("rank", k=3, guard=False, bias_correction=False, dense_lr=0.001),
        Setting("rank", k=3, guard=False, mode="amsgrad", dense_lr=0.001, backend="horovod", case="uneven"),
        Setting("world", k=20, bias_correction=False, dense_lr=0.001, dtype="float32", case="holes"),
        # dense sync, with synchronous and with local rows
        Setting("world", dense="sync", case="uneven"),
        Setting("rank", dense="sync", case="starved", k_rows=20, optimizer="rowwise_adagrad",
                backend="horovod"),
        Setting("rank", dense="sync", case="holes", k_rows=3, dtype="float32"),
        # all ends of data that are awkward for windows and passes
        Setting("rank", case="starved", k=20, k_rows=20, batches_per_pass=5),
        Setting("rank", case="holes", k=3, k_rows=20, batches_per_pass=5, optimizer="rowwise_adagrad"),
        Setting("rank", case="uneven", k=20, k_rows=1, batches_per_pass=1, steps=12),
        Setting("rank", case="uneven", k=100, k_rows=100, batches_per_pass=100),
        Setting("world", case="holes", k=20, batches_per_pass=1, steps=7),
        Setting("rank", steps=1, k=20, k_rows=20),
        Setting("rank", steps=0),
        # first-order weights in the record, other constants
        Setting("rank", model="accept_common:TinyWideNet", case="uneven", optimizer="rowwise_adagrad"),
        Setting("world", model="accept_common:TinyWideNet", case="holes", dtype="float32"),
        Setting("rank", betas=(0.8, 0.95), row_eps=1e-4, dense_eps=1e-3, k=3, k_rows=20),
        # the other merge rules say what becomes of x alone: one window, and x compared at its end
        *(Setting("rank", rule=rule, case="uneven", k_rows=20, steps=14, optimizer=optimizer, row_lr=0.1)
          for rule in ("mean", "mean_all", "sum") for optimizer in ("adam", "rowwise_adagrad")),
    ]


def merge_settings() -> list[Setting]:
    """Merges that grow apart, go on beside a step, are between nodes, or move x alone."""
    node = dict(replica="node", ranks_per_node=2)
    return [
        Setting("rank", overlap=True, k=3, case="holes"),
        Setting("rank", overlap=True, k=1, mode="amsgrad", case="starved", backend="horovod", dtype="float32"),
        Setting("world", overlap=True, k=20, guard=False, dense_lr=0.001, case="uneven"),
        Setting("rank", overlap=True, k=3, steps=15, bias_correction=False, dense_lr=0.001),
        Setting("rank", k=20, k_start=1, grow_steps=7, warmup_steps=3, case="uneven"),
        Setting("rank", k=8, k_start=2, grow_steps=5, overlap=True, mode="amsgrad", case="holes", backend="horovod"),
        Setting(**node, k=3, k_rows=20, case="uneven"),
        Setting(**node, k=20, k_rows=3, dense_workers="node", case="holes"),
        Setting(**node, k=3, dense_workers="node", overlap=True, mode="amsgrad", case="starved", dtype="float32"),
        Setting(**node, dense="sync", case="uneven", route="nodes", backend="auto"),
        Setting(**node, k=3, route="nodes", backend="auto", optimizer="rowwise_adagrad", case="holes"),
        Setting("rank", ranks_per_node=3, k=3, dense_workers="node", route="nodes", backend="auto", case="uneven"),
        *(Setting(replica, ranks_per_node=2, window="x", k_rows=k_rows, optimizer=optimizer, case=case, k=20,
                  batches_per_pass=batches, dtype=dtype)
          for replica, k_rows, optimizer, case, batches, dtype in (
              ("rank", 3, "adam", "holes", 20, "float64"), ("rank", 5, "rowwise_adagrad", "uneven", 20, "float64"),
              ("rank", 1, "adam", "starved", 5, "float64"), ("node", 3, "adam", "uneven", 100, "float64"),
              ("node", 20, "rowwise_adagrad", "holes", 20, "float32"), ("rank", 20, "adam", "even", 100, "float32"))),
    ]


BUILT_IN = ({"name": "deepfm", "hidden": [8, 4]}, {"name": "dlrm"}, {"name": "dnn", "hidden": [8, 4]},
            {"name": "lr"})


# ---------------------------------------------------------------- comparing


def differs(what: str, got, want, tolerance: float, scale: float | None = None) -> list[str]:
    """One message if got is not want within tolerance times scale (default: the larger of 1 and max
    |want|).
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return [f"{what}: shape {got.shape} instead of {want.shape}"]
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return [f"{what}: NaN in other places"]
    if want.size == 0 or np.isnan(want).all():
        return []
    scale = max(1.0, float(np.nanmax(np.abs(want)))) if scale is None else scale
    worst = float(np.nanmax(np.abs(got - want)))
    if worst <= tolerance * scale:
        return []
    return [f"{what}: off by {worst:.2e}, allowed {tolerance * scale:.2e}"]


def largest(array) -> float:
    """Largest absolute entry; 0 for an empty array."""
    return float(np.abs(array).max()) if np.size(array) else 0.0


def compare_rows(parts, want: oracle.RowDict, width: int, tolerance: float, moments: float | None = None,
                 x_only: bool = False) -> list[str]:
    """The rows of all ranks, [(keys, records, t)] by rank, against the oracle's.

    moments: the tolerance of optimizer state, relative to its largest entry; left out, it is ``tolerance``.
    """
    moments = tolerance if moments is None else moments
    keys = np.concatenate([np.asarray(p[0], np.uint64) for p in parts])
    if len(np.unique(keys)) != len(keys):
        return ["rows: a key is owned twice"]
    for rank, part in enumerate(parts):
        owner = ((np.asarray(part[0], np.uint64) >> np.uint64(54)) * np.uint64(len(parts))) >> np.uint64(10)
        if (owner != rank).any():
            return [f"rows: rank {rank} keeps rows of other owners"]
    if set(keys.tolist()) != set(want):
        return [f"rows: {len(keys)} rows, expected {len(want)}"]
    if not want:
        return []
    records = np.concatenate([np.asarray(p[1]) for p in parts if len(p[0])])
    counts = np.concatenate([np.asarray(p[2]) for p in parts]).astype(np.int64)
    x = np.array([want[k][0] for k in keys.tolist()])
    state = np.array([want[k][1] for k in keys.tolist()])
    t = np.array([want[k][2] for k in keys.tolist()])
    out = differs("rows x", records[:, :width], x, tolerance)
    if x_only:
        return out
    names = ("m", "v") if state.shape[1] == 2 * width else ("accumulator",)
    for name, start in zip(names, range(0, state.shape[1], width)):
        stop = start + width if len(names) == 2 else state.shape[1]
        part = state[:, start:stop]
        out += differs(f"rows {name}", records[:, width + start:width + stop], part, moments, largest(part))
    if (counts != t).any():
        out.append(f"rows t: {(counts != t).sum()} of {len(t)} differ")
    return out


def compare(s: Setting, per_rank_result, want: oracle.Result, width: int,
            tolerance: float | None = None) -> list[str]:
    """All that differs between the ranks' results and the oracle's; empty when they agree."""
    tolerance = TOLERANCE[s.dtype] if tolerance is None else tolerance
    out = []
    moments = MOMENT_FACTOR[s.dtype] * tolerance
    for rank, (losses, dense, _, pass_ends) in enumerate(per_rank_result):
        out += differs(f"rank {rank} losses", losses, want.losses[:, rank], tolerance)
        expected = want.dense[rank]
        out += differs(f"rank {rank} dense x", dense["x"], expected["x"], tolerance)
        for name in "mv":
            out += differs(f"rank {rank} dense {name}", dense[name], expected[name], moments,
                           largest(expected[name]))
        if int(dense["t"]) != expected["t"]:
            out.append(f"rank {rank} dense t: {int(dense['t'])} instead of {expected['t']}")
        if s.dense == "kstep" and want.vhat is not None:
            out += differs(f"rank {rank} vhat", dense["vhat"], want.vhat, moments, largest(want.vhat))
        if not np.array_equal(dense["x"], per_rank_result[0][1]["x"]):
            out.append(f"rank {rank} dense x: not the same bits as on rank 0 after the last merge")
        if list(pass_ends) != list(per_rank_result[0][3]):
            out.append(f"rank {rank} pass ends: {pass_ends}, on rank 0 {per_rank_result[0][3]}")
    rows = want.rows[-1] if want.rows else {}
    parts = [r[2] for r in per_rank_result]
    return out + compare_rows(parts, rows, width, tolerance, moments, x_only=s.rule != "mass")


def bad_pass_ends(s: Setting, ends: list[int], steps: int, replicas: int) -> list[str]:
    """Passes cover all steps, are no longer than asked, and end on multiples of k_rows between replicas."""
    if (ends[-1] if ends else 0) != steps or sorted(set(ends)) != list(ends):
        return [f"pass ends {ends} for {steps} steps"]
    longest = max(s.batches_per_pass, s.k_rows) if replicas > 1 else s.batches_per_pass
    out = [f"a pass from {a} to {b} is longer than {longest}"
           for a, b in zip([0, *ends], ends) if b - a > longest]
    if replicas > 1:
        out += [f"pass end {e} is no multiple of {s.k_rows}" for e in ends[:-1] if e % s.k_rows]
    return out
