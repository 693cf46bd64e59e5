"""The benchmarks of the SSD tier, on tables so small that their figures mean nothing, and the parts they are made of."""

import importlib.util
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from hpc_ctr.bench import page_cache, store, tiers
from hpc_ctr.bench.common import Results, Targets
from hpc_ctr.bench.device import RandomReads, no_direct_reads, reads_per_second, write_file
from hpc_ctr.bench.growth import GrowthBench, bench_growth, explained
from hpc_ctr.bench.plot import write_svg
from hpc_ctr.bench.store_data import ROW_BYTES, WORDS, Workload, right
from hpc_ctr.bench.store_files import Lmdb
from hpc_ctr.cli.main import _run as hpc_ctr
from hpc_ctr.cluster.disks import disk_of
from hpc_ctr.data.synthetic import ClickModel, SyntheticOptions, field_ids
from hpc_ctr.errors import HpcCtrError, UsageError


def installed(name: str) -> bool:
    module = store.KINDS[name].module
    return not module or importlib.util.find_spec(module) is not None


def rows_of(path: Path) -> dict[tuple[str, str], dict]:
    """The results of a --json file by case and system, after a look at the file's shape."""
    tree = json.loads(path.read_text())
    assert set(tree) == {"machine", "versions", "rows"}
    assert tree["machine"]["cores"] >= 1 and tree["machine"]["disk"] and tree["versions"]["numpy"]
    for row in tree["rows"]:
        assert set(row) == {"case", "system", "unit", "median", "runs"}
        assert row["runs"] and min(row["runs"]) <= row["median"] <= max(row["runs"])
    return {(row["case"], row["system"]): row for row in tree["rows"]}


# ---------------------------------------------------------------- whole runs


def test_store_measures_every_case_and_system(tmp_path, capsys):
    out = tmp_path / "store.json"
    code = hpc_ctr(["bench", "store", "--rows", "40000", "--batch", "1000", "--rounds", "2", "--age", "0.5",
                    "--dir", str(tmp_path / "bench"), "--json", str(out)])
    told = capsys.readouterr().out
    assert code == 0
    rows = rows_of(out)
    direct = not no_direct_reads(tmp_path)
    for name in store.KINDS:
        there = installed(name) and (direct or name != "device_limit")
        for case in store.CASES:
            assert ((case, name) in rows) == there, (case, name)
            if there:
                row = rows[case, name]
                assert row["unit"] == "rows/s" and len(row["runs"]) == 2 and min(row["runs"]) > 0
        assert there or f"{name} is left out" in told
    assert rows["write_amplification", "hpc_ctr"]["median"] >= 1
    assert "page_cache" in json.loads(out.read_text())["machine"]
    lines = [line for line in told.splitlines() if line.startswith("target ")]
    assert len(lines) == 9 and all(line.endswith(("reached", "MISSED", "not measured")) for line in lines)
    assert not list((tmp_path / "bench").iterdir())


def test_store_of_some_systems_and_cases_keeps_its_files_when_asked(tmp_path, capsys):
    out = tmp_path / "store.json"
    hpc_ctr(["bench", "store", "--rows", "5000", "--rounds", "1", "--dir", str(tmp_path / "bench"), "--json", str(out),
             "--systems", "memmap", "hpc_ctr", "--cases", "get_uniform", "--keep"])
    assert set(rows_of(out)) == {("get_uniform", "hpc_ctr"), ("get_uniform", "memmap")}
    (folder,) = (tmp_path / "bench").iterdir()
    assert str(folder) in capsys.readouterr().out and (folder / "memmap" / "rows.bin").stat().st_size == 5000 * 192


def test_store_refuses_a_system_that_gives_back_wrong_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(store.Memmap, "_numbers", lambda self, keys: np.zeros(len(keys), np.int64))
    with pytest.raises(HpcCtrError, match="memmap gave back other rows"):
        store.bench_store(Results(), store.StoreBench(rows=2000, rounds=1, dir=tmp_path, systems=["memmap"]))


def test_a_peer_that_is_missing_is_told(monkeypatch, capsys):
    monkeypatch.setattr(Lmdb, "module", "a_module_that_nobody_has")
    kinds = store.available(["lmdb", "memmap"])
    assert [kind.name for kind in kinds] == ["memmap"]
    told = capsys.readouterr().out.splitlines()
    assert told == ["lmdb is left out: a_module_that_nobody_has is not installed "
                    "(bash scripts/setup.sh --bench installs it)"]
    with pytest.raises(UsageError, match="--systems"):
        store.available(["lmdb"])


def test_tiers_trains_from_a_full_table_and_loses_nothing(tmp_path, capsys):
    if problem := no_direct_reads(tmp_path):
        pytest.skip(problem)
    out = tmp_path / "tiers.json"
    code = hpc_ctr(["bench", "tiers", "--keys", "100000", "--samples", "400", "--batch", "32", "--ranks", "1",
                    "--rounds", "1", "--cases", "zipf11", "--dir", str(tmp_path / "bench"), "--json", str(out)])
    told = capsys.readouterr().out
    assert code == 0
    rows = rows_of(out)
    for name in ("in_memory", "tenth", "bound"):
        assert rows["zipf11", name]["unit"] == "samples/s" and rows["zipf11", name]["median"] > 0
    assert rows["zipf11", "bound"]["median"] <= rows["zipf11", "in_memory"]["median"]
    assert rows["zipf11", "tenth_cold_rows"]["median"] > 0 and "it was not in memory" not in told
    assert 0 < rows["zipf11", "tenth_miss_rate"]["median"] < 1
    (same,) = [line for line in told.splitlines() if "bit for bit" in line]
    assert same.endswith("reached")
    assert "peak RSS" in told and not list((tmp_path / "bench").iterdir())


def test_growth_on_two_ranks_starts_them_itself(tmp_path, capsys):
    if problem := no_direct_reads(tmp_path):
        pytest.skip(problem)
    plot = tmp_path / "plots" / "growth.svg"
    options = GrowthBench([100_000], samples=256, batch=16, rounds=1, dir=tmp_path / "bench", plot=str(plot))
    results = Results()
    targets = bench_growth(results, options)
    assert results.median("growth", "100000_rows") > 0 and 0 < results.median("growth_miss_rate", "100000_rows") < 1
    assert [value for _, value, _, _ in targets.lines] == [pytest.approx(1.0)]
    assert "2 ranks" in capsys.readouterr().out and ElementTree.parse(plot).getroot().tag.endswith("svg")


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize("words, told", [
    (["store", "--rows", "10"], "--rows"), (["store", "--rounds", "0"], "--rounds"),
    (["store", "--rows", "2000", "--batch", "1500"], "--batch"), (["store", "--systems", "leveldb"], "--systems"),
    (["store", "--cases", "scan"], "--cases"), (["store", "--memory", "1MiB"], "--memory"),
    (["store", "--age", "-1"], "--age"), (["tiers", "--keys", "0"], "--keys"), (["tiers", "--warm", "1"], "--warm"),
    (["tiers", "--cases", "zipf12"], "--cases"), (["tiers", "--keys", "10000000000"], "--keys"),
    (["growth", "--sizes", "10", "5"], "--sizes"), (["growth", "--budget", "much"], "--budget"),
])
def test_wrong_options_are_named(words, told, tmp_path):
    with pytest.raises(UsageError, match=told):
        hpc_ctr(["bench", *words, "--dir", str(tmp_path)])


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - 10**9, 10**9))
    with pytest.raises(UsageError, match=r"--dir: .* free"):
        store.bench_store(Results(), store.StoreBench(dir=tmp_path))
    with pytest.raises(UsageError, match=r"--dir: .* free"):
        tiers.scratch(tmp_path, 10_000_000, 1000, False)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- parts


def test_batches_are_distinct_keys_of_the_table_and_repeat():
    work = Workload(3000, 200, 1.1)
    loaded = [keys for keys, _ in work.load_batches()]
    assert np.array_equal(np.sort(np.concatenate(loaded)), work.ordered) and len(np.unique(work.keys)) == 3000
    for batch in (work.uniform("get", 0), work.popular("get", 0), work.uniform("together", 0, 5)):
        assert len(np.unique(batch)) == len(batch) and np.isin(batch, work.keys).all()
    again = Workload(3000, 200, 1.1)
    assert np.array_equal(work.uniform("get", 3), again.uniform("get", 3))
    assert np.array_equal(work.popular("get", 3), again.popular("get", 3))
    assert not np.array_equal(work.uniform("get", 3), work.uniform("get", 4))


def test_popular_keys_come_often_and_were_not_loaded_together():
    work = Workload(20_000, 200, 1.1)
    batches = np.concatenate([work.popular("get", i) for i in range(50)])
    keys, counts = np.unique(batches, return_counts=True)
    hot = keys[counts >= 45]
    assert 5 <= len(hot) <= 100 and (counts == 1).sum() > 1000
    places = np.flatnonzero(np.isin(work.keys, hot))
    assert places.max() - places.min() > 10_000


def test_right_rows_are_told_from_wrong_ones():
    work = Workload(1000, 50, 1.1)
    keys = work.uniform("get", 0)
    rows = work.records(keys, 7)
    assert rows.shape == (50, WORDS) and (rows[:, 2] == 7).all() and ROW_BYTES == 200
    assert right(rows[::-1], keys)
    assert right(rows, keys, 7) and not right(rows, keys, 8)
    assert not right(rows[:-1], keys)
    rows[3, 0] ^= 1
    assert not right(rows, keys)


@pytest.mark.parametrize("name", [name for name in store.KINDS if name != "device_limit"])
def test_a_put_is_what_the_next_get_gives(name, tmp_path):
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    work = Workload(4000, 300, 1.1)
    system = store.KINDS[name](tmp_path / name, work, 16 << 20)
    try:
        system.load()
        keys = work.uniform("put", 0)
        system.put(system.pack_put(keys, work.records(keys, 9)))
        system.settle()
        for case in ("get_uniform", "get_zipf", "get_together", "get_zipf", "put", "get_uniform"):
            system.prepare(case)
            system.drop()
            words = system.words(system.get(system.pack_get(work.keys[:2000])))
            assert right(words, work.keys[:2000])
            new = np.isin(np.ascontiguousarray(words[:, :2]).view(np.uint64).reshape(-1), keys)
            assert (words[new, 2] == 9).all() and (words[~new, 2] == 0).all() and new.any()
    finally:
        system.close()


def test_files_leave_the_page_cache(tmp_path):
    if disk_of(tmp_path).is_memory:
        pytest.skip("this file system is memory")
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert page_cache.resident(path) == 1 << 20 and page_cache.resident_share([path]) == 1
    page_cache.drop([path, tmp_path / "not there"])
    assert page_cache.resident(path) == 0 and page_cache.resident_share([path]) == 0
    (tmp_path / "empty").touch()
    assert page_cache.resident(tmp_path / "empty") == 0 and page_cache.resident_share([]) == 0


def test_written_bytes_are_counted(tmp_path):
    if disk_of(tmp_path).is_memory:
        pytest.skip("this file system is memory")
    before = page_cache.bytes_written()
    if before is None:
        pytest.skip("this kernel does not count")
    assert write_file(tmp_path / "file", 5_000_000) > 0
    assert 5_000_000 <= page_cache.bytes_written() - before < 6_000_000


def test_the_device_is_read_at_random_around_the_page_cache(tmp_path):
    if problem := no_direct_reads(tmp_path):
        pytest.skip(problem)
    write_file(tmp_path / "device.bin", 1 << 20)
    page_cache.drop([tmp_path / "device.bin"])
    with RandomReads(tmp_path / "device.bin", depth=4) as device:
        assert device.pages == 256 and device.run(1000, 1) > 0
        assert page_cache.resident(tmp_path / "device.bin") == 0
        device.pages = 1 << 20  # beyond the end
        with pytest.raises(UsageError, match="read of"):
            device.run(100, 1)
    assert len(reads_per_second(tmp_path, 1 << 20, 2, 100)) == 2


def test_ids_of_the_generator_are_the_fields_own():
    options = SyntheticOptions(rows=1, ids=1000, fields=7, zipf=0.5, missing=0.1)
    drawn = ClickModel(options).draw(1, 0, 60_000).ids
    for f in range(7):
        ids = field_ids(options, f)
        assert set(drawn[:, f][drawn[:, f] >= 0]) == set(ids) and len(ids) in (142, 143)
        parts = np.concatenate([field_ids(options, f, first, 3) for first in range(3)])
        assert np.array_equal(np.sort(parts), np.sort(ids))
    values, counts = np.unique(drawn[:, 0][drawn[:, 0] >= 0], return_counts=True)
    assert values[counts.argmax()] == field_ids(options, 0)[0]


def test_rates_are_those_after_the_warm_up():
    passes = [{"samples": 100, "seconds": 1.0, "cold_hits": 50, "host_hits": 0, "bytes_read": 10, "disk_read": 10},
              {"samples": 100, "seconds": 9.0, "cold_hits": 60, "host_hits": 90, "bytes_read": 20, "disk_read": 30},
              {"samples": 100, "seconds": 1.0, "cold_hits": 70, "host_hits": 180, "bytes_read": 30, "disk_read": 50}]
    run = tiers.summarise({"passes": passes, "losses": ["0x1p0"], "memory": []}, 0.3)
    assert (run.samples_per_s, run.cold, run.miss, run.direct) == (20.0, 0.1, 0.1, 2.0)
    assert tiers.summarise({"passes": passes, "losses": [], "memory": []}, 0.0).cold == pytest.approx(70 / 300)
    with pytest.raises(UsageError, match="--samples"):
        tiers.summarise({"passes": passes[:1], "losses": [], "memory": []}, 0.5)


def test_misses_explain_what_they_cost_at_the_disk():
    assert explained(1000.0, {1: 0.5, 2: 0.5, 3: 50.5}, 50_000.0) == {1: 1000.0, 2: 1000.0, 3: 500.0}


def test_targets_are_told_as_they_are(capsys):
    results, targets = Results(), Targets()
    for system, figure in (("a", 10.0), ("b", 4.0)):
        results.add("case", system, "x", [figure])
    targets.ratio(results, "case", "a", "b", 2.0)
    targets.ratio(results, "case", "b", "a", 2.0)
    targets.ratio(results, "case", "a", "c", 2.0)
    targets.value("small", 2.5, 2.5, most=True)
    targets.value("small", 2.6, 2.5, most=True)
    capsys.readouterr()
    targets.print()
    ends = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["reached", "MISSED", "measured", "reached", "MISSED"]


def test_plot_is_xml_with_every_line(tmp_path):
    write_svg(tmp_path / "a.svg", "a < b", "x", "y", [1.0, 10.0], {"one": [1.0, 2.0], "two": [2.0, 0.0]})
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(root.findall("{*}polyline")) == 2 and len(root.findall("{*}circle")) == 4
    assert "a < b" in [node.text for node in root.findall("{*}text")]
