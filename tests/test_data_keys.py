"""Keys are the same on every platform: a second program in plain Python, and values written down."""

import numpy as np
import pytest

from hpc_ctr.data.keys import (
    default_key,
    field_salt,
    field_salts,
    hash_bytes,
    id_keys,
    missing_key,
    mix,
    permutation,
    text_key,
)

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def hashed(data: bytes) -> int:
    h = (GOLDEN * (len(data) + 1)) & MASK
    whole = len(data) // 8 * 8
    for at in range(0, whole + 1, 8):
        h = mix64(((h ^ int.from_bytes(data[at:min(at + 8, len(data))], "little")) + GOLDEN) & MASK)
    return h


def key(field: str, value: int) -> int:
    return mix64(value ^ hashed(field.encode()))


@pytest.mark.parametrize("data", [b"", b"a", b"1234567", b"12345678", b"123456789", b"\0", b"\0\0", "Ärger".encode(),
                                  bytes(range(256))])
def test_hash_of_bytes_is_that_of_a_second_program(data: bytes) -> None:
    assert hash_bytes(data) == hashed(data)


def test_keys_are_those_of_a_second_program() -> None:
    ids = np.array([0, 1, 255, 0x68FD1E64, 0xFFFFFFFF, 1 << 40, MASK - 2], np.uint64)
    for field in ("C1", "C26", "user_id", "größe"):
        assert id_keys(field, ids).tolist() == [key(field, int(i)) for i in ids]
        assert text_key(field, "Toy Story") == key(field, hashed(b"Toy Story"))
        assert missing_key(field) == key(field, MASK)
        assert default_key(field) == key(field, MASK - 1)
        assert field_salt(field) == hashed(field.encode())


def test_values_written_down() -> None:
    assert WRITTEN == {
        "hash of nothing": hash_bytes(b""), "hash of abc": hash_bytes(b"abc"),
        "hash of 123456789": hash_bytes(b"123456789"), "salt of C1": field_salt("C1"),
        "C1 0": int(id_keys("C1", np.array([0]))[0]), "C1 68fd1e64": int(id_keys("C1", np.array([0x68FD1E64]))[0]),
        "C26 ffffffff": int(id_keys("C26", np.array([0xFFFFFFFF]))[0]), "C1 missing": missing_key("C1"),
        "C1 default": default_key("C1"), "user_id 196": text_key("user_id", "196"),
        "class Children's": text_key("class", "Children's"), "mix 1 2 3": mix(1, 2, 3), "mix -1": mix(-1),
        "permutation": permutation(8, 1, 2).tolist()}


def test_ids_of_a_field_never_share_a_key_and_the_shards_are_even() -> None:
    keys = id_keys("C3", np.arange(100_000))
    assert len(np.unique(keys)) == 100_000
    counts = np.bincount((keys >> np.uint64(54)).astype(np.int64), minlength=1024)
    assert len(counts) == 1024
    chi = float(((counts - 100_000 / 1024) ** 2 / (100_000 / 1024)).sum())
    assert 1023 - 5 * 45.2 < chi < 1023 + 5 * 45.2             # 5 standard deviations of chi-square
    fields = [f"C{i}" for i in range(1, 27)]
    every = np.concatenate([id_keys(f, np.arange(1000)) for f in fields])
    assert len(np.unique(every)) == 26_000
    assert len(set(field_salts(fields).tolist())) == 26


def test_permutations() -> None:
    orders = [permutation(1000, 7, epoch) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(1000)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[0], permutation(1000, 7, 0))
    assert permutation(0, 1).tolist() == [] and permutation(1, 1).tolist() == [0]
    places = np.array([permutation(4, seed)[0] for seed in range(4000)])
    assert np.abs(np.bincount(places) - 1000).max() < 150


WRITTEN = {
    "hash of nothing": 0x6e789e6aa1b965f4,
    "hash of abc": 0x5855b53efd9f911e,
    "hash of 123456789": 0x80c073356fee0bec,
    "salt of C1": 0x2687d5ff2030ec2f,
    "C1 0": 0xabf157c62f43ec56,
    "C1 68fd1e64": 0x6f716b93f7f6ccdc,
    "C26 ffffffff": 0x87d0d8becf7fdc15,
    "C1 missing": 0x76f070f564c5f8b3,
    "C1 default": 0xfaa4be206a2522ac,
    "user_id 196": 0x6148f40f58dd39d8,
    "class Children's": 0xa32c2a6de2b874f0,
    "mix 1 2 3": 0xfbb6d9641b852e79,
    "mix -1": 0xda26e52fa3730902,
    "permutation": [6, 2, 5, 0, 7, 1, 3, 4],
}
