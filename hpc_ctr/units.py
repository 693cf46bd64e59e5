"""Byte sizes as people write them."""

import re

from hpc_ctr.errors import UsageError

LARGEST = 2**63 - 1  # of whole numbers in a job file: what machines and libraries count with
_FACTORS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20,
            "g": 10**9, "gb": 10**9, "gib": 2**30, "t": 10**12, "tb": 10**12, "tib": 2**40}


def parse_bytes(text: str | int, setting: str = "size") -> int:
    """Number of bytes in ``text``: 4096, "512MiB", "2 GB".

    Raises UsageError, which names ``setting``, when it is not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
        if match is None or match[2].lower() not in _FACTORS:
            raise UsageError(f"{setting}: {text!r} is not a size; write it like 512MiB or 2GB")
        value = int(float(match[1]) * _FACTORS[match[2].lower()])
    if value <= 0:
        raise UsageError(f"{setting}: {text!r} must be more than zero bytes")
    if value > LARGEST:
        raise UsageError(f"{setting}: {text!r} is more than any machine has; write it like 512MiB or 2GB")
    return value


def format_bytes(value: float) -> str:
    """``value`` bytes with a binary unit and three digits: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
