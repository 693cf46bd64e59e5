"""Settings of the training loop, evaluation, model and checkpoints."""

from dataclasses import dataclass, field

from hpc_ctr.errors import UsageError

MOST_THREADS = 1024


@dataclass
class ModelOptions:
    """Which tower, and its own options (each model's module lists them)."""

    name: str = "deepfm"  # lr | deepfm | dlrm | dnn | package.module.Class of your own
    options: dict = field(default_factory=dict)

    @classmethod
    def from_dict(cls, tree: dict) -> "ModelOptions":
        """``{name: dnn, hidden: [64]}``: all but the name goes to the model."""
        if not isinstance(tree, dict):
            raise UsageError(f"model: must be a section with a name, not {tree!r}")
        tree = dict(tree)
        name = tree.pop("name", cls.name)
        if not isinstance(name, str) or not name:
            raise UsageError(f"model.name: {name!r} is not the name of a model")
        options = tree.pop("options", {}) or {}
        if not isinstance(options, dict):
            raise UsageError(f"model.options: must be a mapping, not {options!r}")
        return cls(name, {**options, **tree})


@dataclass
class TrainOptions:
    """The loop."""

    batches_per_pass: int = 100  # at most; a small storage.host_budget makes passes shorter
    max_steps: int = 0  # stop after so many steps; 0 = at the end of the data
    log_every: int = 100  # steps a line of metrics.jsonl covers
    threads: int = 1  # of torch in each rank
    trace: bool = False  # write every exchange, with bytes, begin and end, to <run_dir>/trace/rank-NNNN.jsonl

    def check(self) -> None:
        """Raises UsageError naming the setting."""
        _at_least("train", self, batches_per_pass=1, max_steps=0, log_every=1, threads=1)
        if self.threads > MOST_THREADS:  # torch starts them all, until the node can start nothing else
            raise UsageError(f"train.threads: must be at most {MOST_THREADS}, not {self.threads}")


@dataclass
class EvalOptions:
    """When the test part of the data is evaluated; always at the end of training."""

    every_passes: int = 0  # also after every so many passes; 0 = only at the end

    def check(self) -> None:
        """Raises UsageError naming the setting."""
        _at_least("eval", self, every_passes=0)


@dataclass
class CheckpointOptions:
    """Checkpoints are written at pass ends, and at the end of training."""

    every_passes: int = 0  # after every so many passes; 0 = only at the end and on a signal
    keep: int = 2  # how many complete ones stay
    dir: str = ""  # where; empty = <run_dir>/checkpoints

    def check(self) -> None:
        """Raises UsageError naming the setting."""
        _at_least("checkpoint", self, every_passes=0, keep=1)


def _at_least(section: str, options: object, **limits: int) -> None:
    for name, limit in limits.items():
        value = getattr(options, name)
        if value < limit:
            raise UsageError(f"{section}.{name}: must be at least {limit}, not {value}")
