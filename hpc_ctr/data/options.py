"""The job file's section ``data``."""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpc_ctr.data.blocks import MAX_TEXT
from hpc_ctr.data.schema import Schema, check_choice, check_keys
from hpc_ctr.errors import UsageError
from hpc_ctr.units import LARGEST, parse_bytes

FORMATS = ("criteo", "recbole")
SPLITS = ("none", "time", "hash", "files")
DEALS = ("block", "batch")


def _number(value: Any, kind: type, setting: str, low: float, high: float = float("inf")) -> Any:
    """``value``; a number that YAML 1.1 takes for text, such as 1e-3, as the number. Raises UsageError."""
    names = {int: "a whole number", float: "a number"}
    if kind is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    good = isinstance(value, kind if kind is int else (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= min(high, LARGEST):
        span = f"from {low:g} to {high:g}" if high < float("inf") else f"of at least {low:g} and below 2^63"
        raise UsageError(f"{setting}: {value!r} must be {names[kind]} {span}")
    return value


def _texts(value: Any, setting: str) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v for v in value):
        raise UsageError(f"{setting}: {value!r} must be a list of file names or patterns")
    return list(value)


@dataclass
class SplitOptions:
    """How rows are divided into train and test.

    by: none (all rows train), time (the latest share tests; ties go to train), hash (by the text of the row and the
    seed), files (``data.test_files`` tests). test: the share of rows that tests, for time and hash.
    """

    by: str = "none"
    test: float = 0.2

    def validate(self, setting: str = "data.split") -> None:
        """Raises UsageError."""
        check_choice(self.by, SPLITS, f"{setting}.by")
        self.test = _number(self.test, float, f"{setting}.test", 0.0, 1.0)
        if self.by in ("time", "hash") and not 0.0 < self.test < 1.0:
            raise UsageError(f"{setting}.test: {self.test!r} must lie between 0 and 1, for example 0.2")


@dataclass
class DataOptions:
    """The settings of the data.

    format: criteo (tab separated, no header: label, dense, hex ids; plain or .gz) or recbole (atomic files with a
    ``name:type`` header). files, test_files: paths or patterns. user_file, item_file: RecBole side tables, joined on
    their first column. schema: a Schema or the mapping for ``Schema.from_dict``; None: Criteo's 13 and 26 columns.
    batch_size: samples a rank and step. shuffle: seeded, blocks first, then the rows of ``shuffle_blocks`` blocks
    together. block_bytes: "auto" or a size. deal: block (each rank reads its own blocks) or batch (every rank keeps its
    stripe of every global batch). max_bad_share: the run stops when a larger share of the rows cannot be read;
    max_bad_reported: so many of them are listed. base_dir: relative names of files that are not there from the working
    directory are looked up below it (the job file's folder).
    """

    format: str = "criteo"
    files: list = field(default_factory=list)
    test_files: list = field(default_factory=list)
    user_file: str = ""
    item_file: str = ""
    schema: Any = None
    split: Any = field(default_factory=SplitOptions)
    batch_size: int = 2048
    epochs: int = 1
    shuffle: bool = True
    shuffle_blocks: int = 4
    block_bytes: int | str = "auto"
    deal: str = "block"
    max_bad_share: float = 0.001
    max_bad_reported: int = 20
    base_dir: str = ""

    @staticmethod
    def from_dict(entry: "Mapping | DataOptions", setting: str = "data") -> "DataOptions":
        """From the job file's mapping, checked. Raises UsageError, which names the setting."""
        if isinstance(entry, DataOptions):
            entry = {f.name: getattr(entry, f.name) for f in fields(DataOptions)}
        if not isinstance(entry, Mapping):
            raise UsageError(f"{setting}: {entry!r} must be a mapping of settings")
        check_keys(entry, [f.name for f in fields(DataOptions)], setting)
        options = DataOptions(**{k: v for k, v in entry.items() if v is not None or k == "schema"})
        options.validate(setting)
        return options

    def validate(self, setting: str = "data") -> None:
        """Checks everything that can be checked without opening a file, and turns mappings into options.

        Raises UsageError.
        """
        check_choice(self.format, FORMATS, f"{setting}.format")
        self.files = _texts(self.files, f"{setting}.files")
        self.test_files = _texts(self.test_files, f"{setting}.test_files")
        if not self.files:
            raise UsageError(f"{setting}.files: no file is named")
        self._validate_split(setting)
        self._validate_schema(setting)
        for name in ("user_file", "item_file", "base_dir"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise UsageError(f"{setting}.{name}: {value!r} must be a path")
            if value and name != "base_dir" and self.format != "recbole":
                raise UsageError(f"{setting}.{name}: only format recbole joins files; leave it out")
        for name in ("batch_size", "epochs", "shuffle_blocks"):
            _number(getattr(self, name), int, f"{setting}.{name}", 1)
        _number(self.max_bad_reported, int, f"{setting}.max_bad_reported", 1)
        self.max_bad_share = _number(self.max_bad_share, float, f"{setting}.max_bad_share", 0, 1)
        if not isinstance(self.shuffle, bool):
            raise UsageError(f"{setting}.shuffle: {self.shuffle!r} must be true or false")
        check_choice(self.deal, DEALS, f"{setting}.deal")
        if self.block_bytes != "auto":
            size = parse_bytes(self.block_bytes, f"{setting}.block_bytes")
            if size > MAX_TEXT:
                raise UsageError(f"{setting}.block_bytes: {self.block_bytes!r} is more than 1GiB")

    def _validate_split(self, setting: str) -> None:
        if isinstance(self.split, Mapping):
            check_keys(self.split, [f.name for f in fields(SplitOptions)], f"{setting}.split")
            self.split = SplitOptions(**self.split)
        if not isinstance(self.split, SplitOptions):
            raise UsageError(f"{setting}.split: {self.split!r} must be a mapping with by and test")
        self.split.validate(f"{setting}.split")
        if self.split.by == "files" and not self.test_files:
            raise UsageError(f"{setting}.test_files: split.by is files, so name the files to test on")
        if self.test_files and self.split.by != "files":
            raise UsageError(f"{setting}.test_files: they are used only with split.by: files, and it is "
                             f"{self.split.by!r}")

    def _validate_schema(self, setting: str) -> None:
        where = f"{setting}.schema"
        if self.schema is None and self.format != "criteo":
            raise UsageError(f"{where}: format {self.format} needs one: label, dense, categorical")
        base = Schema.criteo() if self.format == "criteo" else None
        self.schema = Schema.from_dict({} if self.schema is None else self.schema, base, where)
        if self.split.by == "time" and not self.schema.time:
            raise UsageError(f"{where}.time: split.by is time, so name the column that holds it")
        if self.format == "criteo":
            if self.schema.label_rule.column != "label":
                raise UsageError(f"{where}.label: column {self.schema.label_rule.column!r} is not in format criteo, "
                                 "whose first column is 'label'")
            if self.schema.time:
                raise UsageError(f"{where}.time: format criteo has no time column; split by hash or files")
            for column in self.schema.categorical:
                if column.separator:
                    raise UsageError(f"{where}.categorical: column {column.column!r} has a separator, and format "
                                     "criteo holds one id a cell")

    def to_dict(self) -> dict:
        """Plain lists, dicts, texts and numbers, such that ``from_dict`` gives the same options back."""
        plain = {f.name: getattr(self, f.name) for f in fields(DataOptions)}
        plain["schema"] = self.schema.to_dict() if isinstance(self.schema, Schema) else self.schema
        plain["split"] = asdict(self.split) if isinstance(self.split, SplitOptions) else self.split
        return plain
