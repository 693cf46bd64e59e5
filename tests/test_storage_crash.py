"""Crashes at every file operation of puts, evictions, flushes, compactions, checkpoints and a restore.

All operations are recorded and played on a disk in memory (crash_disk.py), which then loses power after each of them,
in many ways. Beside it processes are really killed: run as a program (with a directory), this file does that.
"""

import ast
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from crash_disk import Disk, put_down, read_up
from storage_common import (
    LAYOUT,
    OPTIONS,
    OneRank,
    as_dict,
    between,
    checkpoint_contents,
    checkpoint_rows,
    contents,
    manifest_of,
    rows_of,
)

from hpc_ctr.checkpoint import save, state
from hpc_ctr.checkpoint.load import segment_files
from hpc_ctr.storage import fs, manifest, recovery
from hpc_ctr.storage.tiered import TieredStore, budget_for

PACKAGE = Path(save.__file__).resolve().parent.parent
STATES = 6      # random states after each operation, beside the four extremes
BUDGET = budget_for(LAYOUT, 70, 320)     # the cache holds about a third of the rows


# --- what is done


def save_step(root, store, step, value):
    """A checkpoint of one table, of which the last alone is kept."""
    return save.save(Path(root) / "checkpoints", OneRank(), manifest_of(step), {"dense.x": np.full(40, value)},
                     {"default": store}, keep=1).folder


def opened(root):
    """The store of the scenario."""
    return TieredStore(os.path.join(root, "store"), LAYOUT, BUDGET, options=OPTIONS)


class Work:
    """What is done to a store. ``note(rows, committed, saved)`` is called after each step: all rows that were put;
    whether each commit of the step held all of them; the checkpoint that was made."""

    def __init__(self, root, note, rows):
        self.root, self.note, self.rows = root, note, rows

    def put(self, store, keys, version):
        """Rows into the cache, and from there on as it has to."""
        data = rows_of(keys, version)
        store.put(*data)
        self.rows.update(as_dict(*data))
        self.note(self.rows, False)

    def flush(self, store):
        """Commit all rows."""
        store.flush()
        self.note(self.rows)

    def checkpoint(self, store, step, value):
        """A checkpoint of all rows, and of arrays that hold a value."""
        save_step(self.root, store, step, value)
        self.note(self.rows, True, (step, [float(value)] * 40, dict(self.rows)))

    def fill(self):
        """From a new directory on: puts, evictions, flushes, compactions."""
        store = opened(self.root)
        self.note(self.rows)
        self.put(store, range(0, 80), 1)
        self.flush(store)
        self.put(store, range(40, 240), 2)      # more than the cache holds: rows are evicted
        self.flush(store)
        self.put(store, range(100, 160), 3)
        self.flush(store)
        store.cold.compact()
        self.note(self.rows)
        store.close()

    def save(self):
        """Checkpoints; each removes the one before it."""
        store = opened(self.root)
        self.checkpoint(store, 5, 1)
        self.put(store, range(0, 30), 4)
        self.checkpoint(store, 10, 2)
        self.checkpoint(store, 10, 3)           # the same step again, as at the end of a resumed run
        store.close()

    def restore(self):
        """The last checkpoint again, into the same directory."""
        recovery.adopt(os.path.join(self.root, "store"), LAYOUT, pooled(self.root))
        self.note(self.rows)
        store = opened(self.root)
        self.put(store, range(200, 260), 5)
        self.flush(store)
        store.close()


STAGES = (Work.fill, Work.save, Work.restore)


def pooled(root):
    """The segments that the last checkpoint names."""
    folder = state.find(Path(root) / "checkpoints")
    [[paths]] = segment_files(folder.parent, state.read_manifest(folder))
    return paths


def record(action):
    """Run ``action(note)``; the operations that it made, and (number of operations, rows, committed, saved) after
    each step."""
    operations, steps = [], []
    before, fs.recorder = fs.recorder, lambda *operation: operations.append(operation)
    try:
        action(lambda rows, committed=True, saved=None: steps.append(
            SimpleNamespace(end=len(operations), rows=dict(rows), committed=committed, saved=saved)))
    finally:
        fs.recorder = before
    return operations, steps


def events(operations, kind, name):
    """(number of operations until it can be seen, until it is on the disk) of each manifest or DONE."""
    found = []
    for i, (operation, path, _) in enumerate(operations):
        if operation == kind and os.path.basename(path) == name:
            synced = (j for j in range(i, len(operations))
                      if operations[j][0] == "sync directory" and operations[j][1] == os.path.dirname(path))
            found.append((i + 1, next(synced) + 1))
    return found


def allowed(history, done):
    """Values of ``history`` (seen from, on the disk from, value) that may be there after ``done`` operations."""
    first = max(i for i, (_, durable, _) in enumerate(history) if durable <= done)
    last = max(i for i, (visible, _, _) in enumerate(history) if visible <= done)
    return [value for _, _, value in history[first:last + 1]]


class Looker:
    """Says what a new process finds in a tree, and remembers it."""

    def __init__(self, place):
        self.place, self.known = str(place), {}

    def __call__(self, tree):
        """(rows of the store, contents of the checkpoint)."""
        return tuple(self._part(tree, part, look) for part, look in
                     (("store", contents), ("checkpoints", checkpoint_contents)))

    def _part(self, tree, part, look):
        tree = {path: data for path, data in tree.items() if path.split("/")[0] == part}
        key = part, hash(frozenset(tree.items()))
        if key not in self.known:
            put_down(tree, self.place)
            self.known[key] = look(os.path.join(self.place, part))
        return self.known[key]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """What a sync means is told by the disk in memory."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The recorded scenario: operations, steps, and the histories of committed rows and of checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        root = tmp_path_factory.mktemp("recorded")
        return told(root, tmp_path_factory.mktemp("look"))


def told(root, place):
    """Run the scenario once, and find out what each commit made."""
    os.makedirs(root, exist_ok=True)
    operations, steps, stages, rows = [], [], [], {}
    for stage in STAGES:
        more, noted = record(lambda note, stage=stage: stage(Work(str(root), note, rows)))
        stages.append((len(operations), len(more), stage))
        for step in noted:
            step.end += len(operations)
        operations, steps = operations + more, steps + noted
    commits = events(operations, "rename", manifest.NAME)
    disk, looker, stores = Disk(root), Looker(place), [(0, 0, {})]
    for done, operation in enumerate(operations, 1):
        disk.play(*operation)
        for visible, durable in (commit for commit in commits if commit[1] == done):
            stores.append((visible, durable, looker(disk.present())[0]))
    assert disk.present() == read_up(root), "not all changes were recorded"
    saved = [(0, 0, None)]
    saves = [step.saved for step in steps if step.saved]
    for event, value in zip(events(operations, "create", state.DONE), saves, strict=True):
        saved.append((*event, value))
    return SimpleNamespace(root=root, operations=operations, steps=steps, stages=stages, stores=stores, saved=saved)


# --- every operation is seen


def test_every_commit_is_what_was_put(recorded):
    """What the replay compares with is itself compared with the rows that were put."""
    begin, before, exact, some = 0, {}, 0, 0
    for step in recorded.steps:
        commits = [rows for visible, _, rows in recorded.stores[1:] if begin < visible <= step.end]
        for rows in commits:
            assert rows == step.rows if step.committed else between(rows, before, step.rows)
        if commits:
            before = commits[-1]
        exact, some = exact + step.committed * len(commits), some + (not step.committed) * len(commits)
        begin = step.end
    assert exact > 10 and some > 1 and len(recorded.operations) > 200, (exact, some)
    kinds = {operation for operation, _, _ in recorded.operations}
    assert kinds == {"create", "write", "resize", "sync", "sync directory", "rename", "link", "remove",
                     "make directory", "remove directory"}


def calls_beside_fs(source):
    """Calls in a source file that change files without storage/fs.py, and imports that would allow it."""
    changing = {"write_text", "write_bytes", "unlink", "rmdir", "mkdir", "makedirs", "rename", "symlink_to",
                "hardlink_to", "rmtree", "tofile", "memmap", "ftruncate"}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            found += [name for name in names if name in ("shutil", "tempfile", "mmap", "fcntl")]
        if isinstance(node, ast.Name) and node.id == "open":
            found.append("open")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            harmless = {"os": ("path", "SEEK_END", "walk", "getpid", "sched_getaffinity"),
                        "h5py": ("string_dtype", "h5t", "h5p", "h5d", "h5s")}
            if name not in harmless.get(owner, (name,)) or (owner == "np" and name in ("save", "fromfile")):
                found.append(f"{owner}.{name}")
        if isinstance(node, ast.Attribute) and node.attr in changing and ast.unparse(node.value) != "fs":
            found.append(node.attr)
    return found


def test_files_are_changed_through_fs_alone():
    """Neither the stores nor the checkpoints touch a file by themselves."""
    files = [path for room in ("storage", "checkpoint") for path in sorted((PACKAGE / room).glob("*.py"))
             if path.name != "fs.py"]
    assert len(files) > 10
    for path in files:
        assert calls_beside_fs(path.read_text(encoding="utf-8")) == [], path
    found = calls_beside_fs("import shutil\nos.remove(x)\nopen(y)\nz.unlink()\nfs.rename(a, b)\nos.path.join(a)")
    assert sorted(found) == ["open", "os.remove", "shutil", "unlink"]


# --- power fails


def check(recorded, done, found, how):
    """What was found after ``done`` operations is a state that was committed: the last, or the one under way."""
    rows, saved = found
    where = f"after operation {done - 1}, {recorded.operations[done - 1] if done else 'none'}: {how}"
    assert rows in allowed(recorded.stores, done), f"other rows {where}"
    assert saved in allowed(recorded.saved, done), f"another checkpoint {where}"


def test_power_fails_after_every_operation(recorded, tmp_path):
    """Unsynced changes dropped, kept, torn and reordered: the rows are the last committed ones, the checkpoint is
    the last or the one being made, all its files are whole, and leftovers are gone."""
    rng = np.random.default_rng(1)
    disk, looker = Disk(recorded.root), Looker(tmp_path / "look")
    for done in range(len(recorded.operations) + 1):
        if done:
            disk.play(*recorded.operations[done - 1])
        for number, tree in enumerate(disk.states(rng, STATES)):
            check(recorded, done, looker(tree), f"state {number}")
    assert len(looker.known) > 300


def go_on(root, rows, saved):
    """After a crash: the next checkpoint of the rows that are there removes what was left, and the checkpoint that
    was there, if any, had been good enough to restore from."""
    if saved:
        with TieredStore.restore(os.path.join(root, "restored"), pooled(root), LAYOUT, BUDGET) as store:
            assert store.rows == len(saved[2]) and store.verify() == []
    with opened(root) as store:
        store.put(*rows_of(range(300, 310), 9))
        folder = save_step(root, store, 20, 9)
    pool = os.path.join(root, "checkpoints", "pool")
    assert sorted(os.listdir(os.path.dirname(pool))) == ["pool", folder.name]
    assert set(os.listdir(pool)) == {os.path.basename(path) for path in pooled(root)}
    assert checkpoint_rows(folder) == rows | as_dict(*rows_of(range(300, 310), 9))


def test_after_a_crash_work_goes_on(recorded, tmp_path):
    """Restoring, writing and saving on top of what a loss of power left; a second loss finds the same rows."""
    rng = np.random.default_rng(2)
    disk, looker, root = Disk(recorded.root), Looker(tmp_path / "look"), str(tmp_path / "crashed")
    for done in range(0, len(recorded.operations)):
        disk.play(*recorded.operations[done])
        if done % 2:
            tree = disk.random_state(rng)
            rows, saved = looker(tree)
            put_down(tree, root)
            go_on(root, rows, saved)


def test_power_fails_after_a_killed_process(recorded, tmp_path):
    """A process is killed, the next one opens the store, which tidies up, and saves; then power fails. What the
    first had not synced may be lost even now, so nothing may be removed that the older state needs."""
    rng = np.random.default_rng(3)
    disk, looker, root = Disk(recorded.root), Looker(tmp_path / "look"), str(recorded.root)
    for done, operation in enumerate(recorded.operations, 1):
        disk.play(*operation)
        if operation[0] != "rename" and done % 12:
            continue
        tree = disk.present()
        rows, saved = looker(tree)
        put_down(tree, root)
        again, steps = record(lambda note: open_and_save(root))
        second = disk.copy()
        made = events(again, "create", state.DONE)[0][0]
        for later, operation in enumerate(again, 1):
            second.play(*operation)
            for tree in (*second.extremes(), second.random_state(rng)):
                found = looker(tree)
                assert found[0] in allowed(recorded.stores, done), (done, later, operation)
                assert found[1] in allowed(recorded.saved, done) or (later >= made and found[1] == (20, [9.0] * 40, rows))


def open_and_save(root):
    """Open the store and save its rows, without a change to them."""
    with opened(root) as store:
        save_step(root, store, 20, 9)


# --- processes that are really killed


def child(root, stage, number):
    """Run a stage; die after file operation ``number``."""
    seen = 0

    def die(operation, path, detail):
        nonlocal seen
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    fs.recorder = die
    stage(Work(root, lambda *_: None, {}))
    os._exit(1)


def kill_everywhere(base):
    """For each file operation: a process that is killed there, and a look at what it left."""
    os.fsync = lambda descriptor: None  # what a killed process has written is not lost
    recorded = told(os.path.join(base, "recorded"), os.path.join(base, "look"))
    gc.disable()  # a collection in a child would copy the whole heap
    disk, done, root = Disk(recorded.root), 0, os.path.join(base, "killed")
    looker = Looker(os.path.join(base, "look"))
    for _, count, stage in recorded.stages:
        before = disk.present()
        for number in range(count):
            put_down(before, root)
            pid = os.fork()
            if pid == 0:
                child(root, stage, number)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            disk.play(*recorded.operations[done])
            done += 1
            found = looker(read_up(root))
            check(recorded, done, found, "killed")
            if done % 8 == 0:
                go_on(root, *found)
    print(f"{done} processes killed")


def test_killed_processes(tmp_path):
    """SIGKILL after every file operation: as after a loss of power, with nothing lost that was written."""
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 200


if __name__ == "__main__":
    kill_everywhere(sys.argv[1])
