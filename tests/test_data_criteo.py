"""Criteo TSV: awkward files and the rows they hold, bad rows with their line, and the real log."""

import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest
from data_common import read_all

from hpc_ctr.data.keys import id_keys, missing_key
from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.source import open_source
from hpc_ctr.errors import DataError, UsageError
from hpc_ctr.kernels.parse import parse_number

TWO = {"dense": [{"column": "a", "transform": "log1p"}, "b"], "categorical": ["f", {"column": "g", "missing": "skip"}]}
CRITEO8K = Path(os.environ.get("HPC_CTR_CRITEO8K", Path(__file__).parents[2] / "shared/data/criteo8k"))
real = pytest.mark.skipif(not (CRITEO8K / "train.tsv").exists(), reason=f"no Criteo rows in {CRITEO8K} "
                          "(set HPC_CTR_CRITEO8K)")


def criteo(path: Path | list[Path], **more):
    files = [str(p) for p in (path if isinstance(path, list) else [path])]
    return open_source(DataOptions.from_dict({"files": files, "shuffle": False, **more}), seed=1)


def key(field: str, value: int) -> int:
    return int(id_keys(field, np.array([value], np.uint64))[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 9, 40, 1000])
def test_awkward_rows(tmp_path: Path, packed: bool, block_bytes: int) -> None:
    text = ("1\t3\t-2\t68fd1e64\tFFFFFFFF\n"
            "0\t\t\t\t\r\n"                                     # nothing but a label, and a carriage return
            "0\t-5\t7\t0\t80e26c9b01234567\n"                   # a negative count, an id of 64 bits
            "1\t1.5e1\t+0.25\t0000000a\t\n"
            "0\t0\t0\ta\t00000000000000ff")                     # no line end
    path = tmp_path / ("rows.tsv.gz" if packed else "rows.tsv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    source = criteo(path, schema=TWO, batch_size=3, block_bytes=block_bytes)
    assert [(f.name, f.multi) for f in source.fields] == [("f", False), ("g", True)]
    assert source.num_dense == 2
    one, two = read_all(source)
    assert one.label.tolist() == [1, 0, 0] and two.label.tolist() == [1, 0]
    assert one.label.dtype == one.dense.dtype == np.float32
    assert np.allclose(one.dense, [[math.log(4), -2], [0, 0], [0, 7]], rtol=1e-7)
    assert np.allclose(two.dense, [[math.log(16), 0.25], [0, 0]], rtol=1e-7)
    # field-major: three bags of f, then three of g, of which the second is empty
    assert one.keys.tolist() == [key("f", 0x68FD1E64), missing_key("f"), key("f", 0), key("g", 0xFFFFFFFF),
                                 key("g", 0x80E26C9B01234567)]
    assert one.offsets.tolist() == [0, 1, 2, 3, 4, 4, 5] and one.offsets.dtype == np.int64
    assert two.keys.tolist() == [key("f", 10), key("f", 10), key("g", 255)]
    assert two.offsets.tolist() == [0, 1, 2, 2, 3]
    assert source.bad_rows.count == 0 and source.bad_rows.total == 5


BAD = [(1, "1\t2\t3\t4", "4 columns instead of 5"), (2, "1\t2\t3\t4\t5\t6", "6 columns instead of 5"),
       (3, "", "the line is empty"), (5, "2\t\t\t\t", "column 1 (label): '2' is not a label"),
       (6, "\t1\t1\t1\t1", "column 1 (label): the label is empty"), (7, "x\t\t\t\t", "'x' is not a label"),
       (8, "1\t12x\t\t\t", "column 2 (a): '12x' is not a number"), (9, "1\t\tnan\t\t", "column 3 (b): 'nan' is not a"),
       (10, "1\t\t1e\t\t", "'1e' is not a number"), (11, "1\t-\t\t\t", "column 2 (a): '-' is not a number"),
       (13, "1\t\t\t0x12\t", "column 4 (f): '0x12' is not an id"),
       (14, "1\t\t\t\tg0", "column 5 (g): 'g0' is not an id"),
       (15, "1\t\t\t0123456789abcdef0\t", "is not an id of 1 to 16 hex digits"),
       (16, "1\t\t\tfffffffffffffffe\t", "the id 'fffffffffffffffe' is reserved"),
       (17, "1\t1e999\t\t\t", "not a number"),
       (18, "1\t \t\t\t", "column 2 (a): ' ' is not a number"), (20, "1\t\t\t\t-", "'-' is not an id")]


@pytest.mark.parametrize("name", ["bad.tsv", "bad.tsv.gz"])
@pytest.mark.parametrize("block_bytes", [1, 30, 10_000])
def test_bad_rows_are_named(tmp_path: Path, name: str, block_bytes: int) -> None:
    lines = {n: text for n, text, _ in BAD}
    text = "".join(lines.get(n, "1\t1\t1\t1\t1") + "\n" for n in range(1, 21)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    source = criteo(path, schema=TWO, max_bad_share=0.9, block_bytes=block_bytes)
    assert sum(b.size for b in read_all(source)) == 20 - len(BAD)
    bad = source.bad_rows
    assert (bad.count, bad.total) == (len(BAD), 20)
    assert [(f, n) for f, n, _ in bad.examples] == [(str(path), n) for n, _, _ in BAD]
    for (_, _, reason), (_, _, wanted) in zip(bad.examples, BAD, strict=True):
        assert wanted in reason
    few = criteo(path, schema=TWO, max_bad_share=0.9, max_bad_reported=3, block_bytes=block_bytes)
    read_all(few)
    assert len(few.bad_rows.examples) == 3 and few.bad_rows.count == len(BAD)


def test_too_many_bad_rows_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("1\t1\t1\t1\t1\n" * 998 + "broken\n" + "1\t1\t1\t1\t1\n")
    read_all(criteo(path, schema=TWO, max_bad_share=0.001))                     # 1 of 1000: just allowed
    source = criteo(path, schema=TWO, max_bad_share=0.0009)
    with pytest.raises(DataError, match=r"1 of 1000 rows .*data.max_bad_share = 0.0009 .*tsv, line 999: 1 columns"):
        read_all(source)
    with pytest.raises(DataError, match="max_bad_share = 0 "), \
            criteo(path, schema=TWO, max_bad_share=0, batch_size=10).stream() as stream:
        list(stream)


def test_a_file_full_of_bad_rows_stops_early(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("1\t1\t1\t1\t1\n" + "1;1;1;1;1\n" * 100_000)
    source = criteo(path, schema=TWO, block_bytes="64KiB", max_bad_share=0.01)
    with pytest.raises(DataError, match="line 2: 1 columns instead of 5"):
        read_all(source)
    assert source.bad_rows.total < 20_000


def test_a_wrong_schema_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("1\t1\t1\t1\n" * 20)
    with pytest.raises(UsageError, match=r"data.files: rows.tsv has 4 columns, and the schema describes 5"):
        criteo(path, schema=TWO)
    with pytest.raises(UsageError, match="the schema describes 40"):
        criteo(path)
    path.write_text("broken at the very top\n" + "1\t1\t1\t1\t1\n" * 20)
    assert criteo(path, schema=TWO, max_bad_share=1).num_blocks == 1


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged_gz(tmp_path: Path, damage: str) -> None:
    data = gzip.compress(os.urandom(50_000).hex().encode() + b"\n1\t1\t1\t1\t1\n" * 5000)
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(data[:len(data) // 2] if damage == "cut" else b"no gzip at all")
    with pytest.raises(DataError, match=r"rows.tsv.gz is damaged or cut off: .*; fetch it again"):
        read_all(criteo(path, schema=TWO, max_bad_share=1))


def test_file_that_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("1\t1\t1\t1\t1\n" * 1000)
    source = criteo(path, schema=TWO)
    path.write_text("1\t1\t1\t1\t1\n" * 10)
    with pytest.raises(DataError, match="became shorter while it was read"):
        read_all(source)


@pytest.mark.parametrize("text", ["0", "-0", "7", "-12", "+3", "123456789012345", "0.1", "-3.75", "1e5", "2.5E-3", ".5",
                                  "5.", "881250949", "1393632000.123", "0.0000001", "9007199254740993", "1e22",
                                  "1e-22"])
def test_numbers_are_read_as_python_reads_them(text: str) -> None:
    buf = np.frombuffer(text.encode(), np.uint8)
    assert parse_number(buf, 0, len(buf)) == (float(text), True)


@pytest.mark.parametrize("text", ["123456789012345678901234567890", "1.23456789012345678901e-5", "1e-310", "3e300",
                                  "0." + "0" * 40 + "1", "1" + "0" * 50])
def test_long_numbers_are_within_two_units(text: str) -> None:
    buf = np.frombuffer(text.encode(), np.uint8)
    value, ok = parse_number(buf, 0, len(buf))
    assert ok and abs(value - float(text)) <= 2 * math.ulp(float(text))


@pytest.mark.parametrize("text", ["", "-", ".", "e5", "1e", "1e+", "1.2.3", "0x1", "nan", "inf", "1 ", " 1", "1,5",
                                  "--1"])
def test_not_numbers(text: str) -> None:
    buf = np.frombuffer(text.encode(), np.uint8)
    assert not parse_number(buf, 0, len(buf))[1]


@real
def test_real_log_has_no_bad_rows() -> None:
    for name, rows in (("train", 7200), ("dev", 409), ("test", 391)):
        source = criteo(CRITEO8K / f"{name}.tsv")
        batches = read_all(source)
        assert sum(b.size for b in batches) == source.bad_rows.total == rows
        assert source.bad_rows.count == 0
    first = read_all(criteo(CRITEO8K / "train.tsv"))[0]
    cells = (CRITEO8K / "train.tsv").read_text().splitlines()[0].split("\t")
    assert first.label[0] == int(cells[0])
    wanted = [math.log1p(max(int(c), 0)) if c else 0 for c in cells[1:14]]
    assert np.allclose(first.dense[0], wanted, rtol=1e-6)
    keys = [key(f"C{i + 1}", int(c, 16)) if c else missing_key(f"C{i + 1}") for i, c in enumerate(cells[14:])]
    assert first.keys[::first.size].tolist() == keys


@real
@pytest.mark.parametrize("block_bytes", ["auto", "1MiB"])
def test_ten_damaged_lines_are_reported(tmp_path: Path, block_bytes: str) -> None:
    lines = (CRITEO8K / "train.tsv").read_text().splitlines()
    damage = {3: lambda c: c[:-1], 1000: lambda c: [*c, "1"], 1001: lambda c: ["2", *c[1:]],
              1500: lambda c: ["", *c[1:]], 2222: lambda c: [*c[:3], "1x", *c[4:]],
              3333: lambda c: [*c[:20], "68fd1e6g", *c[21:]],
              4000: lambda c: [], 5555: lambda c: [*c[:39], "not hex"], 7199: lambda c: [" ".join(c)],
              7200: lambda c: [*c[:13], "--3", *c[14:]]}
    for line, change in damage.items():
        lines[line - 1] = "\t".join(change(lines[line - 1].split("\t")))
    path = tmp_path / "damaged.tsv"
    path.write_text("\n".join(lines) + "\n")
    source = criteo(path, max_bad_share=0.01, block_bytes=block_bytes)
    assert sum(b.size for b in read_all(source)) == 7190
    assert (source.bad_rows.count, source.bad_rows.total) == (10, 7200)
    assert [(f, n) for f, n, _ in source.bad_rows.examples] == [(str(path), n) for n in sorted(damage)]
    for (_, _, reason), wanted in zip(source.bad_rows.examples, [
            "39 columns", "41 columns", "'2' is not a label", "label is empty", "column 4 (I3): '1x'",
            "column 21 (C7): '68fd1e6g'", "empty", "column 40 (C26): 'not hex'", "1 columns", "column 14 (I13): '--3'"],
            strict=True):
        assert wanted in reason
    with pytest.raises(DataError, match="10 of 7200 rows cannot be read"):
        read_all(criteo(path))


@real
def test_real_log_packed_equals_plain(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv.gz"
    path.write_bytes(gzip.compress((CRITEO8K / "train.tsv").read_bytes(), 1))
    plain, packed = read_all(criteo(CRITEO8K / "train.tsv")), read_all(criteo(path))
    assert len(plain) == len(packed)
    for a, b in zip(plain, packed, strict=True):
        assert np.array_equal(a.keys, b.keys) and np.array_equal(a.dense, b.dense) and np.array_equal(a.label, b.label)
