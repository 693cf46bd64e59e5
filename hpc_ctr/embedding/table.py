"""Tables: which fields share dimension, row optimizer, dtype and rows."""

import difflib
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpc_ctr.errors import UsageError
from hpc_ctr.storage.lifecycle import LifecycleOptions
from hpc_ctr.storage.record import RecordLayout

OPTIMIZERS = ("adam", "rowwise_adagrad")
NUMBERS = ("lr", "eps", "init_scale", "beta1", "beta2")


@dataclass
class EmbeddingOptions:
    """Settings of all tables, and of single ones where ``tables`` names them.

    tables: list of mappings with ``name`` and ``fields`` and any of the other settings here, and ``lifecycle`` with
    settings of that section; fields that no entry names form the table "default".
    """

    dim: int = 16  # floats of a row's vector
    dtype: str = "float32"  # of x and state: float32 | float64
    optimizer: str = "adam"  # adam | rowwise_adagrad
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    init_scale: float = 0.01  # new vectors are uniform in [-init_scale, init_scale)
    tables: list = field(default_factory=list)

    def check(self) -> None:
        """Raises UsageError naming the setting."""
        _check("embedding.", self)
        names = set()
        for number, entry in enumerate(self.tables):
            where = f"embedding.tables[{number}]"
            if not isinstance(entry, dict) or "name" not in entry or not isinstance(entry.get("fields"), list):
                raise UsageError(f"{where}: each entry needs a name and a list of fields")
            # the name is also that of a folder
            if not isinstance(entry["name"], str) or not re.fullmatch(r"\w[\w.-]*", entry["name"]):
                raise UsageError(f"{where}.name: {entry['name']!r} is not made of letters, digits, _, - and . alone")
            if not entry["fields"] or not all(isinstance(name, str) for name in entry["fields"]):
                raise UsageError(f"{where}.fields: must be the names of one or more fields, not {entry['fields']!r}")
            if entry["name"] in names or entry["name"] == "default":
                raise UsageError(f"{where}.name: {entry['name']!r} is taken; every table needs a name of its own")
            names.add(entry["name"])
            known = set(self.__dataclass_fields__) - {"tables"} | {"lifecycle"}
            for key in entry.keys() - {"name", "fields"} - known:
                near = difflib.get_close_matches(key, known, 1, 0.5)
                raise UsageError(f"{where}.{key}: unknown setting; "
                                 + (f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"))
            _check(f"{where}.", _specialised(self, entry))


@dataclass(frozen=True)
class Table:
    """One table as it is used: fields by number, the record's shape and the row optimizer's settings.

    A record is ``x[width] | state[state_width]``; x is the vector of ``dim`` floats and, when ``first_order``, one
    more float: the first-order weight.
    """

    name: str
    fields: tuple[int, ...]
    dim: int
    first_order: bool
    dtype: np.dtype
    optimizer: str
    lr: float
    beta1: float
    beta2: float
    eps: float
    init_scale: float
    lifecycle: LifecycleOptions | None = None  # None: every key has a row for ever

    @property
    def layout(self) -> RecordLayout:
        """How the stores keep its rows."""
        return RecordLayout(self.width, self.state_width, self.dtype, self.lifecycle is not None)

    @property
    def width(self) -> int:
        """Floats of x."""
        return self.dim + int(self.first_order)

    @property
    def state_width(self) -> int:
        """Floats of the row optimizer's state."""
        return 2 * self.width if self.optimizer == "adam" else 1

    @property
    def floats(self) -> int:
        """Floats of a record."""
        return self.width + self.state_width


def make_tables(options: EmbeddingOptions, field_names: list[str], first_order: bool,
                vectors: bool = True, lifecycle: LifecycleOptions | None = None) -> list[Table]:
    """The tables of a job, "default" first where it has fields.

    Fields keep the schema's order inside a table. A model without vectors (``vectors`` False) gets dim 0.
    Raises UsageError for a field that does not exist or stands in two tables, and for a table's lifecycle.
    """
    number = {name: i for i, name in enumerate(field_names)}
    taken: dict[str, str] = {}
    entries = []
    for at, entry in enumerate(options.tables):
        for name in entry["fields"]:
            if name not in number:
                near = difflib.get_close_matches(name, field_names, 1, 0.5)
                raise UsageError(f"embedding.tables[{at}].fields: {name!r} is not a categorical field; "
                                 + (f"did you mean {near[0]}?" if near else f"fields: {', '.join(field_names)}"))
            if name in taken:
                raise UsageError(f"embedding.tables[{at}].fields: {name!r} is in table {taken[name]!r} already")
            taken[name] = entry["name"]
        entries.append((entry["name"], sorted(number[name] for name in entry["fields"]), entry))
    rest = [i for name, i in number.items() if name not in taken]
    if rest:
        entries.insert(0, ("default", rest, {}))
    life = tables_lifecycle(options, lifecycle or LifecycleOptions())
    return [_table(name, fields, _specialised(options, entry), first_order, vectors, life.get(name, lifecycle))
            for name, fields, entry in entries]


def tables_lifecycle(options: EmbeddingOptions, general: LifecycleOptions) -> dict[str, LifecycleOptions]:
    """The lifecycle of every table that is named. Raises UsageError naming the setting."""
    return {entry["name"]: general.for_table(entry.get("lifecycle"), f"embedding.tables[{at}].lifecycle.")
            for at, entry in enumerate(options.tables)}


def _table(name: str, fields: list[int], o: EmbeddingOptions, first_order: bool, vectors: bool,
           lifecycle: LifecycleOptions | None) -> Table:
    return Table(name, tuple(fields), o.dim if vectors else 0, first_order, np.dtype(o.dtype), o.optimizer, o.lr,
                 o.beta1, o.beta2, o.eps, o.init_scale, lifecycle if lifecycle and lifecycle.every else None)


def _specialised(options: EmbeddingOptions, entry: dict) -> EmbeddingOptions:
    own = {k: _as_number(v) if k in NUMBERS else v for k, v in entry.items() if k not in ("name", "fields", "lifecycle")}
    return replace(options, **own, tables=[])


def _as_number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; what is no number stays as it is, for ``_check`` to refuse."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check(prefix: str, o: EmbeddingOptions) -> None:
    if not isinstance(o.dim, int) or isinstance(o.dim, bool) or o.dim < 1:
        raise UsageError(f"{prefix}dim: must be a whole number of at least 1, not {o.dim!r}")
    if o.dtype not in ("float32", "float64"):
        raise UsageError(f"{prefix}dtype: {o.dtype!r} is not one of float32, float64")
    if o.optimizer not in OPTIMIZERS:
        raise UsageError(f"{prefix}optimizer: {o.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
    for name in ("lr", "eps", "init_scale"):
        value = getattr(o, name)
        if not _is_number(value) or not 0 <= value < float("inf"):
            raise UsageError(f"{prefix}{name}: must be a number of at least 0, not {value!r}")
    for name in ("beta1", "beta2"):
        value = getattr(o, name)
        if not _is_number(value) or not 0 <= value < 1:
            raise UsageError(f"{prefix}{name}: must be in [0, 1), not {value!r}")
