"""hpc-ctr store: what verify, compact and inspect say about stores, checkpoints, damage and wrong directories."""

import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import cli_env, hpc_ctr
from test_storage_recovery import flip

from hpc_ctr.checkpoint import state
from hpc_ctr.checkpoint.save import save
from hpc_ctr.cli.main import _run
from hpc_ctr.errors import StorageError, UsageError
from hpc_ctr.storage.cold import ColdStore
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.segment import SegmentFile
from hpc_ctr.storage.tiered import TieredStore, budget_for
from hpc_ctr.train import progress

LAYOUT = RecordLayout(20, 30)
WORDS = ("items", "users")


def rows_of(first, last, seed):
    rng = np.random.default_rng(seed)
    keys = np.arange(first, last, dtype=np.uint64)
    return keys, rng.random((len(keys), LAYOUT.floats), np.float32), rng.integers(0, 99, len(keys), dtype=np.uint32)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def local(tmp_path) -> Path:
    """What two ranks have on a local disk: two tables each; 100 rows a table, 40 of them put twice."""
    for rank in range(2):
        for table in WORDS:
            with ColdStore(str(tmp_path / "local" / f"rank-{rank:04d}" / table), LAYOUT, table) as store:
                store.put(*rows_of(0, 100, 1))
                store.put(*rows_of(60, 100, 2))
    return tmp_path / "local"


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A run folder with two checkpoints that share a segment, and the store of the run."""
    root = tmp_path / "run" / "checkpoints"
    entries = {f.name: 0 for f in fields(state.Manifest) if f.name != "format"}
    budget = budget_for(LAYOUT, 200, 1000)
    with TieredStore(str(tmp_path / "run" / "store" / "rank-0000" / "items"), LAYOUT, budget, "items") as store:
        for step, rows in ((5, rows_of(0, 80, 1)), (10, rows_of(60, 100, 2))):
            store.put(*rows)
            manifest = state.Manifest(**entries | {"step": step, "ranks": 1, "tables": [{"name": "items"}], "order": {},
                                                   "segments": {}, "bytes": {}, "tiers": {}, "exchanges": {}})
            save(root, MPI.COMM_SELF, manifest, {"dense.x": np.arange(50.0)}, {"items": store}, 9)
    return tmp_path / "run"


def said(capsys, *words) -> tuple[int, str]:
    """Exit code and output of ``hpc-ctr store words``."""
    code = _run(["store", *map(str, words)])
    return code, capsys.readouterr().out


def damage_row(path: Path, row: int) -> None:
    with SegmentFile(str(path)) as file:
        place = file.offset + row * file.layout.stored_bytes + 18
    flip(path, place)


# ---------------------------------------------------------------- verify


def test_verify_of_whole_stores(local, capsys):
    """A table, a rank and all of them, also beside a process that has the store open."""
    for where, stores in ((local / "rank-0000" / "items", 1), (local / "rank-0001", 2), (local, 4)):
        code, told = said(capsys, "verify", where)
        found = f"{stores} store{'s' * (stores > 1)}, 0 checkpoints"
        assert code == 0 and told == f"{where}: nothing is damaged ({found})\n"
    with ColdStore(str(local / "rank-0000" / "items"), LAYOUT, "items"):
        files = sorted(local.rglob("*"))
        assert said(capsys, "verify", local)[0] == 0
        assert sorted(local.rglob("*")) == files


def test_verify_names_every_damaged_file(local, capsys):
    """One line a file, with the row, over all stores below the directory."""
    a, b = (local / place / "segment-0000000001.h5" for place in ("rank-0000/items", "rank-0001/users"))
    lost = local / "rank-0000" / "users" / "segment-0000000002.h5"
    torn = local / "rank-0001" / "items" / "manifest.json"
    damage_row(a, 17)
    damage_row(b, 99)
    damage_row(b, 3)
    lost.unlink()
    torn.write_bytes(torn.read_bytes()[:-9])
    code, told = said(capsys, "verify", local)
    lines = told.splitlines()
    assert code == 1 and len(lines) == 4, told
    for path, what in ((a, "row 17 is damaged"), (b, "row 3 is damaged"), (lost, "not there"), (torn, "damaged")):
        assert sum(str(path) in line and what in line for line in lines) == 1, told
    torn.unlink()
    assert f"{torn}" in said(capsys, "verify", torn.parent)[1]


def test_verify_of_checkpoints(run_folder, capsys):
    """The run folder, its checkpoints, one of them, and the pool."""
    root = run_folder / "checkpoints"
    first, second = state.complete(root)
    for where, found in ((run_folder, "1 store, 2 checkpoints"), (root, "0 stores, 2 checkpoints"),
                         (root / "pool", "0 stores, 2 checkpoints"), (second, "0 stores, 1 checkpoint")):
        code, told = said(capsys, "verify", where)
        assert code == 0 and told == f"{where}: nothing is damaged ({found})\n"
    shared, late = state.read_manifest(second).segments["items"][0]
    assert state.read_manifest(first).segments["items"][0] == [shared]
    damage_row(root / "pool" / late, 7)
    assert said(capsys, "verify", first)[0] == 0
    code, told = said(capsys, "verify", second)
    assert code == 1 and told.count("\n") == 1 and f"{root / 'pool' / late}: row 7 is damaged" in told


def test_verify_of_a_damaged_checkpoint(run_folder, capsys):
    """Every kind of file of a checkpoint is read, and a segment that two of them name is told once."""
    root = run_folder / "checkpoints"
    first, second = state.complete(root)
    shared, late = (root / "pool" / name for name in state.read_manifest(second).segments["items"][0])
    whole = late.read_bytes()
    for other in (root / "pool").iterdir():     # links of the store's files: a copy, so that only the pool is damaged
        data = other.read_bytes()
        other.unlink()
        other.write_bytes(data)
    shared.write_bytes(whole)                   # a sound file with the name of another
    late.unlink()
    flip(first / "rank-0000.npz", (first / "rank-0000.npz").stat().st_size // 2)
    (second / "rank-0000.npz").unlink()
    code, told = said(capsys, "verify", run_folder)
    lines = told.splitlines()
    assert code == 1 and len(lines) == 4, told
    for path, what in ((shared, "digest"), (late, "not there"), (first / "rank-0000.npz", "damaged"),
                       (second / "rank-0000.npz", "damaged")):
        assert sum(str(path) in line and what in line for line in lines) == 1, told
    (second / "checkpoint.json").write_text("{")
    code, told = said(capsys, "verify", second)
    assert code == 1 and told.count("\n") == 1 and str(second / "checkpoint.json") in told


def test_verify_needs_neither_torch_nor_mpi(local):
    program = ("import sys; from hpc_ctr.cli.main import _run; code = _run(['store', 'verify', sys.argv[1]]);"
               "assert not {'torch', 'mpi4py.MPI'} & set(sys.modules); sys.exit(code)")
    done = subprocess.run([sys.executable, "-c", program, str(local)], env=cli_env(), capture_output=True, text=True)
    assert done.returncode == 0 and "nothing is damaged (4 stores" in done.stdout, done.stderr


# ---------------------------------------------------------------- compact


def test_compact_rewrites_what_is_stale(local, capsys):
    """Bytes before and after; the same rows; and nothing to do the second time."""
    directory = local / "rank-0000" / "items"
    before = sum(path.stat().st_size for path in directory.glob("*.h5"))
    wanted = {0: rows_of(0, 100, 1)[1][0].tobytes(), 70: rows_of(60, 100, 2)[1][10].tobytes()}
    code, told = said(capsys, "compact", directory)
    after = sum(path.stat().st_size for path in directory.glob("*.h5"))
    assert code == 0 and told.startswith(f"{directory}: {before} bytes before, {after} after") and after < before
    assert "60 rows moved" in told
    with ColdStore(str(directory), LAYOUT, "items") as store:
        assert all(s.live == s.rows for s in store.segments()) and store.rows == 100
        got = {int(k): r.tobytes() for keys, records, _ in store.iterate() for k, r in zip(keys, records)}
    assert {key: got[key] for key in wanted} == wanted
    code, told = said(capsys, "compact", local)
    lines = told.splitlines()
    assert code == 0 and len(lines) == 4 and f"{directory}: {after} bytes before, {after} after" in told
    assert lines[0].endswith("0 rows moved)") and all(line.endswith("60 rows moved)") for line in lines[1:])
    assert said(capsys, "verify", local)[0] == 0


def test_compact_of_a_store_in_use_is_refused(local):
    """From another process, in one line; verify and inspect of the same directory go on."""
    directory = local / "rank-0000" / "items"
    with ColdStore(str(directory), LAYOUT, "items") as store:
        segments = store.segments()
        done = hpc_ctr("store", "compact", directory)
        assert done.returncode == 1 and "open already" in done.stderr and str(directory) in done.stderr
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
        assert _run(["store", "verify", str(directory)]) == _run(["store", "inspect", str(directory)]) == 0
        assert store.segments() == segments


def test_compact_leaves_checkpoints_alone(run_folder, capsys):
    """The run's store is compacted; the pool, whose files are other names of the same data, stays as it is."""
    pool = {path.name: path.read_bytes() for path in (run_folder / "checkpoints" / "pool").iterdir()}
    code, told = said(capsys, "compact", run_folder)
    assert code == 0 and told.count("\n") == 1 and "60 rows moved" in told
    assert {path.name: path.read_bytes() for path in (run_folder / "checkpoints" / "pool").iterdir()} == pool
    assert said(capsys, "verify", run_folder)[0] == 0
    with pytest.raises(UsageError, match="never changed"):
        _run(["store", "compact", str(run_folder / "checkpoints")])


# ---------------------------------------------------------------- inspect


def test_inspect_of_stores(local, capsys):
    """The numbers are those of the store, as text and as JSON."""
    directory = str(local / "rank-0000" / "items")
    with ColdStore(directory, LAYOUT, "items") as store:
        code, told = said(capsys, "inspect", directory, "--json")
        one = json.loads(told)["stores"][0]
        assert code == 0 and one["live"] == store.rows == 100 and one["rows"] == 140
        assert one["disk_bytes"] == store.disk_bytes and one["index_bytes"] >= store.nbytes
        assert [(s["file"], s["rows"], s["live"], s["bytes"]) for s in one["segments"]] == [
            (os.path.basename(s.path), s.rows, s.live, s.nbytes) for s in store.segments()]
    assert (one["table"], one["width"], one["state"], one["dtype"], one["row_bytes"]) == ("items", 20, 30, "float32", 216)
    assert one["stale_share"] == pytest.approx(40 / 140) and one["columns"] == []
    told = said(capsys, "inspect", local)[1]
    assert told.count("rows of 20 + 30 float32 (x + state), 216 bytes") == 4 and told.count("28.6% stale") == 4
    assert told.count("segment-0000000002.h5") == 4


def test_inspect_of_checkpoints_and_of_an_empty_store(run_folder, capsys):
    told = json.loads(said(capsys, "inspect", run_folder, "--json")[1])
    found = [(each["step"], each["segments"], each["tables"]) for each in told["checkpoints"]]
    assert found == [(5, 1, ["items"]), (10, 2, ["items"])]
    pool = sum(path.stat().st_size for path in (run_folder / "checkpoints" / "pool").iterdir())
    assert told["checkpoints"][1]["bytes"] == pool == told["stores"][0]["disk_bytes"]
    assert "step 10, 1 rank, tables items, 2 segments" in said(capsys, "inspect", run_folder)[1]
    ColdStore(str(run_folder / "empty"), LAYOUT).close()
    assert "0 live rows of 0, 0.0% stale, 0 segments" in said(capsys, "inspect", run_folder / "empty")[1]


def test_inspect_of_a_segment(local, capsys, tmp_path):
    """Attributes and the first rows, as they were put."""
    path = local / "rank-0000" / "items" / "segment-0000000002.h5"
    keys, records, t = rows_of(60, 100, 2)
    told = json.loads(said(capsys, "inspect", path, "--json", "--rows", 5)[1])
    assert told["attributes"] == {"format": "hpc_ctr segment", "version": 1, "table": "items", "rows": 40, "width": 20,
                                  "state": 30, "dtype": "float32"} and told["bytes"] == path.stat().st_size
    assert [row["key"] for row in told["first_rows"]] == keys[:5].tolist()
    assert [row["t"] for row in told["first_rows"]] == t[:5].tolist()
    assert [row["x"] + row["state"] for row in told["first_rows"]] == records[:5].tolist()
    text = said(capsys, "inspect", path, "--rows", 1)[1]
    assert "table: items" in text and "dataset rows: [40]" in text and "row 0: key 60" in text and "row 1" not in text
    (tmp_path / "notes.h5").write_text("no HDF5")
    with pytest.raises(StorageError, match=r"notes\.h5"):
        _run(["store", "inspect", str(tmp_path / "notes.h5")])


def test_a_store_with_a_lifecycle(tmp_path, capsys):
    """Its columns and deletions are shown; it is verified and compacted like any other."""
    layout = RecordLayout(4, 0, lifecycle=True)
    directory = str(tmp_path / "users")
    with ColdStore(directory, layout, "users") as store:
        keys, rows = np.arange(200, dtype=np.uint64), layout.empty(200)
        rows[:] = 7
        store.put(keys, rows, np.ones(200, np.uint32))
        store.delete(keys[:50])
    one = json.loads(said(capsys, "inspect", directory, "--json")[1])["stores"][0]
    assert (one["rows"], one["live"], one["deletions"], one["columns"]) == (250, 150, 50, ["show", "click", "last"])
    assert [segment["deletions"] for segment in one["segments"]] == [False, True]
    text = said(capsys, "inspect", directory)[1]
    assert "further columns: show, click, last; 50 deletions" in text and "150 live rows of 250" in text
    assert said(capsys, "verify", directory)[0] == 0
    assert said(capsys, "compact", directory)[0] == 0
    with ColdStore(directory, layout, "users") as store:
        got = np.concatenate([keys for keys, _, _ in store.iterate()])
        assert store.rows == 150 and np.array_equal(np.sort(got), keys[50:])
        assert all(s.live == s.rows for s in store.segments())
    damage_row(min(Path(directory).glob("*.h5")), 9)
    code, told = said(capsys, "verify", directory)
    assert code == 1 and "row 9 is damaged" in told


def test_inspect_into_a_pipe_that_closes_early(local):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hpc_ctr.cli.main", "store", "inspect", str(local)]
    done = subprocess.run(command, env=cli_env(), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- wrong directories, the bar


@pytest.mark.parametrize("what", ["verify", "compact", "inspect"])
@pytest.mark.parametrize("where, why", [("", "no store"), ("gone", "not there"), ("other", "no store")])
def test_wrong_directories(tmp_path, what, where, why):
    """Empty, missing, and one whose manifest.json is of something else."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(UsageError) as caught:
        _run(["store", what, str(tmp_path / where)])
    assert why in str(caught.value) and str(tmp_path / where) in str(caught.value) and "\n" not in str(caught.value)


def test_a_segment_is_no_directory(local):
    path = local / "rank-0000" / "items" / "segment-0000000001.h5"
    done = hpc_ctr("store", "verify", path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is a file" in done.stderr and str(path) in done.stderr


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_the_bar_is_for_terminals_and_for_what_takes_long(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    plain, quick, slow = io.StringIO(), Terminal(), Terminal()
    with progress.Bar("opening", stream=quick) as bar:
        bar.update(1, 2)
    monkeypatch.setattr(progress, "_BAR_AFTER", 0.0)
    for stream in (plain, slow):
        with progress.Bar("opening", stream=stream) as bar:
            bar.update(1 << 20, 2 << 20)
            bar.update(2 << 20, 2 << 20)
    assert plain.getvalue() == quick.getvalue() == "" and "opening" in slow.getvalue()
    with progress.Bar("opening", active=False, stream=slow) as bar:
        before = slow.getvalue()
        bar.update(1, 2)
    assert slow.getvalue() == before


def test_bench_open(tmp_path, capsys):
    """Times of a small store, as JSON, and nothing left behind."""
    (tmp_path / "disk").mkdir()
    assert _run(["bench", "open", "--segments", "4", "--rows", "400", "--runs", "2", "--dir", str(tmp_path / "disk"),
                 "--json", str(tmp_path / "open.json")]) == 0
    told = json.loads((tmp_path / "open.json").read_text())
    assert {(row["case"], row["system"]) for row in told["rows"]} == {
        (case, system) for case in ("open_from_disk", "open_from_cache") for system in ("hpc_ctr", "read_only", "verify")}
    assert all(row["unit"] == "s" and len(row["runs"]) == 2 for row in told["rows"])
    assert not list((tmp_path / "disk").iterdir())
    with pytest.raises(UsageError, match="--segments"):
        _run(["bench", "open", "--segments", "4", "--rows", "3"])
