"""The job file's settings as help text, read from the options' own source so that it cannot fall behind."""

import dataclasses
import inspect
import re
from typing import Any


def settings_help() -> str:
    """All settings by section: name, default, and what stands beside them in the code."""
    from hpc_ctr.config import Config

    lines = ["settings of the job file, and their defaults:"]
    top = [f for f in dataclasses.fields(Config) if not dataclasses.is_dataclass(_default(f))]
    comments = _comments(Config)
    lines += [_line(f.name, _default(f), comments.get(f.name, "")) for f in top]
    for section in dataclasses.fields(Config):
        value = _default(section)
        if dataclasses.is_dataclass(value):
            lines += ["", *_section(section.name, value)]
    return "\n".join(lines)


def _section(name: str, options: Any) -> list[str]:
    comments = _comments(type(options))
    lines = [] if comments else [f"  {line.strip()}" for line in inspect.getdoc(type(options)).splitlines() if line]
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        if dataclasses.is_dataclass(value):
            lines += [_line(f"{name}.{f.name}.{g.name}", getattr(value, g.name), "") for g in dataclasses.fields(value)]
        else:
            lines.append(_line(f"{name}.{f.name}", value, comments.get(f.name, "")))
    return lines


def _line(name: str, default: Any, comment: str) -> str:
    shown = "" if default in ("", None, [], {}) else str(default).lower() if isinstance(default, bool) else str(default)
    return f"  --{name} {shown}".ljust(38) + (f" {comment}" if comment else "")


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def _comments(cls: type) -> dict[str, str]:
    """What the comment behind each field of a dataclass says."""
    found = re.findall(r"^    (\w+): [^#\n]*# (.+)$", inspect.getsource(cls), re.MULTILINE)
    return dict(found)
