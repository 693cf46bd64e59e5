"""The job file: a YAML document composed of the rooms' options, with dotted overrides from the command line."""

import dataclasses
import difflib
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpc_ctr.cluster.options import ClusterOptions
from hpc_ctr.data.options import DataOptions
from hpc_ctr.embedding.table import EmbeddingOptions, tables_lifecycle
from hpc_ctr.errors import UsageError
from hpc_ctr.exchange.replicas import RowsOptions
from hpc_ctr.optim.options import DenseOptions, MergeOptions
from hpc_ctr.storage.lifecycle import LifecycleOptions
from hpc_ctr.storage.tiered import StorageOptions
from hpc_ctr.train.options import CheckpointOptions, EvalOptions, ModelOptions, TrainOptions
from hpc_ctr.units import LARGEST


@dataclass
class Config:
    """A whole job. Sections are the options of the rooms; see each for the meaning of its fields."""

    run_dir: str = "runs/default"  # where the run folder is made
    overwrite: bool = False  # replace a run folder that is already there
    seed: int = 1  # of shuffling, initial rows and dense parameters
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "float32"  # of the dense part: float32 | float64
    precision: str = "float32"  # of the tower's forward and backward pass: float32 | bfloat16 (autocast)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    embedding: EmbeddingOptions = field(default_factory=EmbeddingOptions)
    dense: DenseOptions = field(default_factory=DenseOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)
    rows: RowsOptions = field(default_factory=RowsOptions)
    storage: StorageOptions = field(default_factory=StorageOptions)
    lifecycle: LifecycleOptions = field(default_factory=LifecycleOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)


class _Loader(yaml.SafeLoader):
    """YAML where a name that stands twice is an error, and not silently the second, and so is a loop of aliases."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} stands there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node, index: Any) -> yaml.Node:
        event = self.peek_event()
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent) and node.end_mark is None:
            raise yaml.MarkedYAMLError(problem=f"*{event.anchor} stands inside of what it stands for",
                                       problem_mark=event.start_mark)
        return node


def load(path: str | os.PathLike[str], overrides: dict[str, str] | None = None) -> Config:
    """Read a job file, apply dotted overrides ({"merge.k": "20"}, values parsed as YAML), check everything.

    Raises UsageError naming the setting for anything that is not known or not possible.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"job file {path} cannot be read: {getattr(error, 'strerror', None) or error}; "
                         "give the path of a YAML job file") from error
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise UsageError(f"{where}: not valid YAML ({problem})") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UsageError(f"job file {path}: it must be a mapping of settings, not a {type(tree).__name__}")
    return from_dict(apply_overrides(tree, overrides or {}), base=path.parent)


def from_dict(tree: dict[str, Any], base: Path | None = None) -> Config:
    """A checked Config from nested dicts; relative data files that do not exist here are looked up below ``base``."""
    config = _build(Config, tree, "")
    if base is not None and not config.data.base_dir:
        config.data.base_dir = str(base.resolve())
    check(config)
    return config


def apply_overrides(tree: dict[str, Any], overrides: dict[str, str]) -> dict[str, Any]:
    """A copy of ``tree`` in which every dotted name of ``overrides`` has its new value."""
    tree = _copy(tree)
    for name, text in overrides.items():
        try:
            value = yaml.safe_load(text) if isinstance(text, str) else text
        except yaml.YAMLError as error:
            raise UsageError(f"--{name}: {text!r} cannot be read as a value") from error
        *sections, last = name.split(".")
        into = tree
        for depth, section in enumerate(sections):
            into = into.setdefault(section, {})
            if into is None:
                raise UsageError(f"--{name}: the section {section} is empty in the job file; remove it there")
            if not isinstance(into, dict):
                raise UsageError(f"--{name}: {'.'.join(sections[:depth + 1])} is not a section")
        into[last] = value
    return tree


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved job as plain nested dicts, ready for YAML or JSON."""
    tree = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return _plain({name: value.to_dict() if hasattr(value, "to_dict") else dataclasses.asdict(value)
                   if dataclasses.is_dataclass(value) else value for name, value in tree.items()})


def check(config: Config) -> None:
    """Limits that concern one setting or several together. Raises UsageError."""
    if not config.run_dir:
        raise UsageError("run_dir: no folder is named")
    config.run_dir = os.path.expanduser(config.run_dir)
    config.checkpoint.dir = os.path.expanduser(config.checkpoint.dir)
    _one_of("device", config.device, ("auto", "cpu", "cuda"))
    _one_of("dtype", config.dtype, ("float32", "float64"))
    _one_of("precision", config.precision, ("float32", "bfloat16"))
    config.data.validate()
    for name in ("model", "embedding", "dense", "merge", "rows", "storage", "lifecycle", "cluster", "train", "eval",
                 "checkpoint"):
        section = getattr(config, name)
        if hasattr(section, "check"):
            section.check()
    tables_lifecycle(config.embedding, config.lifecycle)
    if config.precision == "bfloat16" and config.dtype == "float64":
        raise UsageError("precision: bfloat16 autocast needs dtype float32")


def _build(cls: type, tree: Any, prefix: str) -> Any:
    """An instance of the dataclass ``cls`` from a mapping; its own ``from_dict`` is used where it has one."""
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UsageError(f"{prefix[:-1]}: must be a section with settings, not {tree!r}")
    if prefix and hasattr(cls, "from_dict"):
        return cls.from_dict(tree)
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls) if not f.metadata.get("internal")}
    values = {}
    for key, value in tree.items():
        if key not in known:
            raise UsageError(_unknown(f"{prefix}{key}", [prefix + name for name in known]))
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(hint, value, f"{prefix}{key}.")
        else:
            values[key] = coerce(f"{prefix}{key}", value, hint)
    return cls(**values)


def coerce(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``; ints pass as floats, nothing else is bent. Raises UsageError naming ``name``."""
    if isinstance(value, int) and abs(value) > LARGEST and hint is not float:
        raise UsageError(f"{name}: {value} is too large; a whole number must be below 2^63")
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(hint):
            try:
                return coerce(name, value, option)
            except UsageError:
                continue
        expected = " or ".join(_type_name(option) for option in typing.get_args(hint))
        raise UsageError(f"{name}: {value!r} is not {expected}")
    if hint is Any:
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    elif hint is type(None):
        if value is None:
            return None
    elif origin in (list, dict) or hint in (list, dict):
        if isinstance(value, origin or hint):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, hint):
        if hint is str and "\0" in value:
            raise UsageError(f"{name}: {value!r} holds a null character, which no name can; remove it")
        return value
    raise UsageError(f"{name}: {value!r} is not {_type_name(hint)}")


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "empty"}
    return names.get(hint) or {list: "a list", dict: "a mapping"}.get(typing.get_origin(hint) or hint, str(hint))


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}"
    return f"{name}: unknown setting; {hint}"


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return list(tree) if isinstance(tree, list) else tree


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
