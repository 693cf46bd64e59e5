"""Keys: the uint64 id of one feature value, salted with its field and well mixed; the same on every platform.

``key = mix64(value ^ salt(field))``: for hex and integer ids the value is the id itself, so that within a field no two
ids ever share a key; for text it is a 64-bit hash of the bytes. The two largest values are reserved in each field: one
for an empty cell (``missing_key``), one for the row that unknown keys read (``default_key``). The high bits of a key
are uniform: ``key >> 54`` is its shard.
"""

from collections.abc import Sequence

import numpy as np

from hpc_ctr.kernels.hashing import hash_span, mix_range, mix_values
from hpc_ctr.kernels.parse import DEFAULT_VALUE, MISSING_VALUE

SHARD_BITS = 10


def hash_bytes(data: bytes) -> int:
    """64-bit hash of ``data``, the one that text values and field names go through."""
    return int(hash_span(np.frombuffer(data, np.uint8), 0, len(data)))


def mix(*words: int) -> int:
    """One 64-bit value from several integers (taken modulo 2^64), each of which matters in its place."""
    h = np.uint64(len(words))
    for word in words:
        h = mix_values(np.array([word & 0xFFFFFFFFFFFFFFFF], np.uint64), h)[0]
    return int(h)


def field_salt(field: str) -> int:
    """Salt of the field with this name."""
    return hash_bytes(field.encode("utf-8"))


def field_salts(fields: Sequence[str]) -> np.ndarray:
    """Salts, uint64 [F], of the fields with these names."""
    return np.array([field_salt(name) for name in fields], np.uint64)


def id_keys(field: str, ids: np.ndarray) -> np.ndarray:
    """Keys, uint64 [n], of integer ids (0 to 2^64 - 3) of a field: distinct ids have distinct keys."""
    return mix_values(np.ascontiguousarray(ids).astype(np.uint64), np.uint64(field_salt(field)))


def text_key(field: str, text: str | bytes) -> int:
    """Key of a text value of a field."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    return int(mix_values(np.array([hash_bytes(data)], np.uint64), np.uint64(field_salt(field)))[0])


def missing_key(field: str) -> int:
    """Key of an empty cell of the field."""
    return int(mix_values(np.array([MISSING_VALUE]), np.uint64(field_salt(field)))[0])


def default_key(field: str) -> int:
    """Key of the row that unknown keys of the field read; no cell of any file has it."""
    return int(mix_values(np.array([DEFAULT_VALUE]), np.uint64(field_salt(field)))[0])


def permutation(n: int, *words: int) -> np.ndarray:
    """Permutation, int64 [n], of 0..n-1 that depends on the integers ``words`` alone (not on numpy's version)."""
    return np.argsort(mix_range(np.uint64(mix(*words)), n)).astype(np.int64, copy=False)
