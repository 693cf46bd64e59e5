"""The pool of segments: only new ones are copied to another file system, a full disk leaves the last checkpoint whole,
and a run continues the same whatever its local disk still holds.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import (
    base_job,
    complete_checkpoints,
    hpc_ctr,
    losses_by_step,
    ok,
    run_and_kill,
    summary,
    write_criteo,
    write_job,
)
from test_accept_resume import first_difference

from hpc_ctr.checkpoint import state
from hpc_ctr.checkpoint.save import save
from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs
from hpc_ctr.storage.cold import ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.tiered import TieredStore, budget_for

LAYOUT = RecordLayout(4, 8)
PAGE = 4096


@contextmanager
def memory_disk(path: Path, nbytes: int):
    """A file system of so many bytes at ``path``; the test is skipped where none can be mounted."""
    path.mkdir(parents=True)
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system of its own")
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "hpc_ctr-test", str(path)]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def other_disk(path: Path):
    """A folder on another file system than ``path``."""
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK) and shared.stat().st_dev != path.stat().st_dev:
        with tempfile.TemporaryDirectory(prefix="hpc_ctr-test-", dir=shared) as folder:
            yield Path(folder)
    else:
        with memory_disk(path / "other", 64 << 20) as folder:
            yield folder


@contextmanager
def a_folder(path: Path):
    """A new folder."""
    path.mkdir()
    yield path


def rows_of(first: int, last: int, seed: int):
    rng = np.random.default_rng(seed)
    keys = np.arange(first, last, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return keys, rng.random((len(keys), LAYOUT.floats), np.float32), np.full(len(keys), seed, np.uint32)


def checkpoint(root: Path, step: int, store: TieredStore, keep: int = 9):
    entries = {f.name: 0 for f in fields(state.Manifest) if f.name != "format"}
    empty = {"order": {}, "segments": {}, "bytes": {}, "tiers": {}, "exchanges": {}}
    manifest = state.Manifest(**entries | empty | {"step": step, "ranks": 1, "tables": [{"name": "items"}]})
    return save(root, MPI.COMM_SELF, manifest, {"dense.x": np.ones(3)}, {"items": store}, keep)


def pool_files(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (root / "pool").iterdir()}


def everything(store: TieredStore) -> dict[int, bytes]:
    return {int(k): r.tobytes() + n.tobytes() for batch in store.iterate() for k, r, n in zip(*batch)}


# ---------------------------------------------------------------- what is copied


@pytest.mark.parametrize("other", [True, False], ids=["other file system", "same file system"])
def test_only_new_segments_go_into_the_pool(tmp_path, monkeypatch, other):
    """Copied or linked once; a later checkpoint brings what is new; what no checkpoint names is collected."""
    written = []
    monkeypatch.setattr(fs, "probe", lambda operation, path: written.append((operation, os.path.basename(path))))
    with other_disk(tmp_path) if other else a_folder(tmp_path / "same") as disk:
        root = disk / "checkpoints"
        budget = budget_for(LAYOUT, 3000, 5000)
        with TieredStore(str(tmp_path / "store"), LAYOUT, budget, "items") as store:
            store.put(*rows_of(0, 2000, 1))
            first = checkpoint(root, 5, store)
            before = pool_files(root)
            assert first.new_bytes == first.bytes == sum(before.values()) and first.new_segments == 1
            store.put(*rows_of(2000, 2100, 2))
            written.clear()
            second = checkpoint(root, 10, store)
            after = pool_files(root)
            new = set(after) - set(before)
            assert len(new) == second.new_segments == 1 and set(before) < set(after)
            assert second.new_bytes == sum(after[name] for name in new) < second.bytes / 5 == sum(after.values()) / 5
            made = {name.removesuffix(".tmp") for operation, name in written if operation == "create"} & set(after)
            assert made == (new if other else set()), "only what is new is written, and nothing where links do"
            assert {path.stat().st_nlink for path in (root / "pool").iterdir()} == ({1} if other else {2})
            third = checkpoint(root, 15, store, keep=2)
            assert (third.new_bytes, third.new_segments, third.bytes) == (0, 0, second.bytes)
            store.put(*rows_of(0, 2100, 3))     # every row anew: the old segments are dropped by the store
            fourth = checkpoint(root, 20, store, keep=1)
            assert fourth.new_bytes == fourth.bytes == sum(pool_files(root).values())
            assert not set(pool_files(root)) & set(after)
            wanted = everything(store)
        named = state.read_manifest(fourth.folder).segments["items"][0]
        with TieredStore.restore(str(tmp_path / "again"), [str(root / "pool" / name) for name in named], LAYOUT, budget,
                                 "items") as store:
            assert everything(store) == wanted and len(wanted) == 2100


def test_checkpoints_stay_incremental_while_the_store_compacts(tmp_path, monkeypatch):
    """A twentieth of the rows changes between checkpoints: what is rewritten to tidy up must not make each of them
    a whole copy, and none when a rewrite moves a small part of the table (of a large table it does)."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rng = np.random.default_rng(5)
    options = ColdStoreOptions(output_rows=500, max_segments=60)
    keys, records, t = rows_of(0, 20_000, 1)
    order = rng.permutation(len(keys))
    new, everything_in_all = [], []
    with TieredStore(str(tmp_path / "store"), LAYOUT, budget_for(LAYOUT, 4000, 21_000), "items", options) as store:
        for begin in range(0, len(keys), 1000):
            part = order[begin:begin + 1000]
            store.put(keys[part], records[part], t[part])
        checkpoint(tmp_path / "root", 1, store, keep=1)
        for step in range(2, 42):
            part = rng.choice(len(keys), len(keys) // 20, replace=False)
            store.put(keys[part], records[part], t[part] + np.uint32(step))
            saved = checkpoint(tmp_path / "root", step, store, keep=1)
            new.append(saved.new_bytes)
            everything_in_all.append(saved.bytes)
        assert store.cold.counters.rows_compacted > 5_000, "or nothing was rewritten, and the test says nothing"
    share = sum(new) / sum(everything_in_all)
    assert 0.02 < share < 0.2, f"{share:.1%} of a checkpoint is new"
    assert max(a / b for a, b in zip(new, everything_in_all, strict=True)) < 0.2


# ---------------------------------------------------------------- a full disk


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "clicks.tsv"
    write_criteo(path, 6000, 2000, seed=2)
    return path


def job_of(folder: Path, clicks: Path) -> Path:
    """Some 160 steps on two ranks, a checkpoint every twenty; most rows are on disk."""
    return write_job(folder / "job.yaml", base_job(
        folder, clicks, data={"batch_size": 16}, embedding={"dim": 16}, merge={"k": 7, "backend": "mpi"},
        train={"batches_per_pass": 10}, checkpoint={"every_passes": 2, "keep": 99}, storage={"host_budget": "2MiB"}))


@pytest.fixture(scope="module")
def undisturbed(clicks, tmp_path_factory) -> Path:
    """The run folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ok(hpc_ctr("train", job_of(folder, clicks), ranks=2))
    assert len(losses_by_step(folder / "run")) > 60 and summary(folder / "run")["tiers"]["cold_hits"] > 500
    return folder / "run"


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_continues(undisturbed, clicks, tmp_path):
    """Exit code 1 and one line that names the file; nothing half-written stays; with more room the run goes on."""
    needed = sum(path.stat().st_size for path in (undisturbed / "checkpoints").rglob("*") if path.is_file())
    with memory_disk(tmp_path / "small", needed * 6 // 10 // PAGE * PAGE) as disk:
        root = disk / "checkpoints"
        run = ["train", job_of(tmp_path, clicks), "--checkpoint.dir", root]
        done = hpc_ctr(*run, ranks=2)
        lines = [line for line in done.stderr.splitlines() if "hpc-ctr: error" in line]
        assert done.returncode == 1 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
        assert "no space left" in lines[0] and str(root) in lines[0], lines[0]
        kept = state.complete(root)
        assert kept and not (tmp_path / "run" / "summary.json").exists()
        assert {path.name for path in root.iterdir()} == {"pool", *(folder.name for folder in kept)}
        named = {name for folder in kept for ranks in state.read_manifest(folder).segments.values()
                 for files in ranks for name in files}
        assert set(pool_files(root)) == named, "what the failed checkpoint brought still takes room"
        assert hpc_ctr("store", "verify", root).returncode == 0
        subprocess.run(["mount", "-o", f"remount,size={needed * 2}", str(disk)], check=True)
        again = ok(hpc_ctr(*run, "--resume", "auto", ranks=2))
        assert f"continuing from {kept[-1]}" in again.stdout + again.stderr
        assert first_difference(losses_by_step(tmp_path / "run"), losses_by_step(undisturbed)) == ""
        assert summary(tmp_path / "run")["test_logloss"] == summary(undisturbed)["test_logloss"]


def test_a_failed_save_keeps_the_checkpoint_of_the_same_step(tmp_path, monkeypatch):
    """The save at the end of a run may be of a step that has its checkpoint: it is replaced when the new one is whole."""
    budget = budget_for(LAYOUT, 3000, 5000)

    def full(operation, path):
        if operation == "write" and "checkpoint.json" in path:
            raise OSError(28, "No space left on device")

    with TieredStore(str(tmp_path / "store"), LAYOUT, budget, "items") as store:
        store.put(*rows_of(0, 200, 1))
        folder = checkpoint(tmp_path / "root", 5, store, keep=1).folder
        before = pool_files(tmp_path / "root")
        store.put(*rows_of(100, 300, 2))
        monkeypatch.setattr(fs, "probe", full)
        with pytest.raises(StorageError, match=r"no space left .*checkpoint\.json"):
            checkpoint(tmp_path / "root", 5, store, keep=1)
        monkeypatch.setattr(fs, "probe", None)
        assert state.complete(tmp_path / "root") == [folder] and pool_files(tmp_path / "root") == before
        assert checkpoint(tmp_path / "root", 5, store, keep=1).new_segments == 1
        assert state.complete(tmp_path / "root") == [folder] and pool_files(tmp_path / "root") != before


# ---------------------------------------------------------------- what is left on the local disk


@dataclass
class Cut:
    """A run that was killed some steps after its checkpoint: its job, folder, local disk, copies of both, settings."""

    job: Path
    run: Path
    disk: Path
    copy: Path
    settings: list


@pytest.fixture(scope="module")
def cut(clicks, tmp_path_factory) -> Cut:
    """Rows were put after its checkpoint, and are on the local disk."""
    folder = tmp_path_factory.mktemp("cut")
    # less memory than the undisturbed run has, so that rows sink in every pass once it is full; that changes no loss
    found = Cut(job_of(folder, clicks), folder / "run", folder / "local", folder / "copy",
                ["--storage.host_budget", "720KiB", "--checkpoint.every_passes", 40])
    killed = run_and_kill(found.job, found.run, folder, "--storage.dir", found.disk, *found.settings, more=12)
    assert killed.returncode != 0 and complete_checkpoints(found.run)
    linked = {path.stat().st_ino for path in (found.run / "checkpoints" / "pool").iterdir()}
    assert any(path.stat().st_ino not in linked for path in found.disk.rglob("segment-*.h5")), "nothing was put since"
    shutil.copytree(found.run, found.copy)
    return found


@pytest.mark.kills
@pytest.mark.parametrize("disk", ["as it was left", "of another node"])
def test_resume_with_a_later_state_on_the_local_disk_and_with_an_empty_one(disk, cut, undisturbed):
    """The job starts again where it ran, or elsewhere: it continues as if nothing had been."""
    shutil.rmtree(cut.run)
    shutil.copytree(cut.copy, cut.run)
    local = cut.disk if disk == "as it was left" else cut.disk.with_name("elsewhere")
    assert local.exists() == (disk == "as it was left")
    again = ok(hpc_ctr("train", cut.job, "--storage.dir", local, *cut.settings, "--resume", "auto", ranks=2))
    assert "continuing from" in again.stdout + again.stderr
    assert first_difference(losses_by_step(cut.run), losses_by_step(undisturbed)) == ""
    assert summary(cut.run)["test_logloss"] == summary(undisturbed)["test_logloss"]
