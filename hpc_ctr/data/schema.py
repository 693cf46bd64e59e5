"""Which columns of the files are label, dense values, categorical fields and time."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hpc_ctr.errors import UsageError

TRANSFORMS = ("none", "log1p")
MISSING = ("key", "skip")
_COMPARISON = re.compile(r"\s*(.+?)\s*(>=|<=|==|!=|>|<)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*")
_COMPARE = {">=": np.greater_equal, ">": np.greater, "<=": np.less_equal, "<": np.less,
            "==": np.equal, "!=": np.not_equal}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """"; did you mean 'rating'?" for the nearest known name, or "" when none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_keys(entry: Mapping, known: Iterable[str], setting: str) -> None:
    """Raises UsageError for a key of ``entry`` that is not in ``known``."""
    known = list(known)
    for key in entry:
        if key not in known:
            raise UsageError(f"{setting}.{key}: there is no such setting (known: {', '.join(known)})"
                             f"{did_you_mean(key, known)}")


def check_choice(value: Any, choices: tuple[str, ...], setting: str) -> str:
    """``value`` if it is one of ``choices``; else UsageError."""
    if value not in choices:
        raise UsageError(f"{setting}: {value!r} is not one of {', '.join(choices)}{did_you_mean(value, choices)}")
    return value


def _column(entry: Any, known: tuple[str, ...], setting: str) -> dict:
    """A column entry as a dict: a bare name stands for {column: name}."""
    if isinstance(entry, str):
        entry = {"column": entry}
    if not isinstance(entry, Mapping):
        raise UsageError(f"{setting}: {entry!r} must be a column name or a mapping with the key 'column'")
    check_keys(entry, known, setting)
    if not isinstance(entry.get("column"), str) or not entry["column"]:
        raise UsageError(f"{setting}.column: {entry.get('column')!r} must be the name of a column")
    return dict(entry)


@dataclass(frozen=True)
class DenseColumn:
    """A column of numbers. transform: none, or log1p (negatives become 0 first). Empty cells are 0 afterwards."""

    column: str
    transform: str = "none"

    @staticmethod
    def from_entry(entry: "str | Mapping | DenseColumn", setting: str = "data.schema.dense") -> "DenseColumn":
        """From a column name or a mapping; raises UsageError."""
        if isinstance(entry, DenseColumn):
            return entry
        entry = _column(entry, ("column", "transform"), setting)
        check_choice(entry.get("transform", "none"), TRANSFORMS, f"{setting}.transform")
        return DenseColumn(**entry)


@dataclass(frozen=True)
class CategoricalColumn:
    """A categorical field.

    separator: makes it multi-valued ("" = single-valued; None = as the file says: a RecBole token_seq is multi-valued
    with a space between values). missing: an empty cell is the field's missing key (key) or an empty bag (skip).
    """

    column: str
    separator: str | None = None
    missing: str = "key"

    @staticmethod
    def from_entry(entry: "str | Mapping | CategoricalColumn",
                   setting: str = "data.schema.categorical") -> "CategoricalColumn":
        """From a column name or a mapping; raises UsageError."""
        if isinstance(entry, CategoricalColumn):
            return entry
        entry = _column(entry, ("column", "separator", "missing"), setting)
        check_choice(entry.get("missing", "key"), MISSING, f"{setting}.missing")
        separator = entry.get("separator")
        if separator is not None and (not isinstance(separator, str) or re.search(r"[\t\r\n]", separator)):
            raise UsageError(f"{setting}.separator: {separator!r} must be a text without tab and line end")
        return CategoricalColumn(**entry)


@dataclass(frozen=True)
class Field:
    """A categorical field as a source gives it: its name and whether a bag may hold other than one key."""

    name: str
    multi: bool


@dataclass(frozen=True)
class Label:
    """A label column, compared with a number or (no operator) holding 0 or 1 itself."""

    column: str
    operator: str = ""
    number: float = 0.0

    @staticmethod
    def parse(text: str, setting: str = "data.schema.label") -> "Label":
        """From "column" or "column >= 4" (>=, >, <=, <, ==, !=); raises UsageError."""
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"{setting}: {text!r} must be a column name, or a comparison such as \"rating >= 4\"")
        match = _COMPARISON.fullmatch(text)
        if match:
            try:
                return Label(match[1], match[2], float(match[3]))
            except ValueError:
                match = None
        if re.search(r"[<>]|==|!=", text):
            raise UsageError(f"{setting}: {text!r} is not \"column operator number\", such as \"rating >= 4\"")
        return Label(text.strip())

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Labels, float32 [n] of 0 and 1, of column values float64 [n]."""
        if not self.operator:
            return values.astype(np.float32)
        return _COMPARE[self.operator](values, self.number).astype(np.float32)


@dataclass(frozen=True)
class Schema:
    """Label (see ``Label.parse``), dense columns [D], categorical columns [F], and the time column ("" = none)."""

    label: str = "label"
    dense: tuple[DenseColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    time: str = ""

    @property
    def label_rule(self) -> Label:
        """The label column and its comparison."""
        return Label.parse(self.label)

    @staticmethod
    def criteo(num_dense: int = 13, num_fields: int = 26) -> "Schema":
        """The columns of the Criteo display-advertising logs: label, I1.. (log1p), C1.."""
        return Schema("label", tuple(DenseColumn(f"I{i + 1}", "log1p") for i in range(num_dense)),
                      tuple(CategoricalColumn(f"C{i + 1}") for i in range(num_fields)))

    @staticmethod
    def from_dict(entry: "Mapping | Schema", base: "Schema | None" = None, setting: str = "data.schema") -> "Schema":
        """From the job file's mapping; what it leaves out comes from ``base``. Raises UsageError."""
        if isinstance(entry, Schema):
            entry = {f.name: getattr(entry, f.name) for f in fields(Schema)}
        if not isinstance(entry, Mapping):
            raise UsageError(f"{setting}: {entry!r} must be a mapping with label, dense, categorical and time")
        check_keys(entry, [f.name for f in fields(Schema)], setting)
        base = base or Schema()
        columns = {}
        for name, kind in (("dense", DenseColumn), ("categorical", CategoricalColumn)):
            entries = entry.get(name, getattr(base, name))
            entries = () if entries is None else entries
            if isinstance(entries, (str, Mapping)) or not isinstance(entries, Iterable):
                raise UsageError(f"{setting}.{name}: {entries!r} must be a list of columns")
            columns[name] = tuple(kind.from_entry(e, f"{setting}.{name}[{i}]") for i, e in enumerate(entries))
        time = entry.get("time", base.time) or ""
        if not isinstance(time, str):
            raise UsageError(f"{setting}.time: {time!r} must be the name of a column")
        schema = Schema(entry.get("label", base.label), columns["dense"], columns["categorical"], time)
        schema.validate(setting)
        return schema

    def validate(self, setting: str = "data.schema") -> None:
        """Raises UsageError when a column appears twice, is its own label, or there is no feature at all."""
        label = Label.parse(self.label, f"{setting}.label")
        for name, columns in (("dense", self.dense), ("categorical", self.categorical)):
            names = [c.column for c in columns]
            for column in names:
                if names.count(column) > 1:
                    raise UsageError(f"{setting}.{name}: column {column!r} is listed twice")
                if column == label.column:
                    raise UsageError(f"{setting}.{name}: column {column!r} is the label; a model must not see it")
        if not self.dense and not self.categorical:
            raise UsageError(f"{setting}: neither dense nor categorical columns are given, so there is nothing to "
                             "learn from")

    def to_dict(self) -> dict:
        """Plain lists, dicts and texts, such that ``from_dict`` gives the same schema back."""
        return {"label": self.label,
                "dense": [{"column": c.column, "transform": c.transform} for c in self.dense],
                "categorical": [{"column": c.column, "separator": c.separator, "missing": c.missing}
                                for c in self.categorical],
                "time": self.time}
