"""Checkpoints: the same rows and quality on any rank count, damage told in one sentence, old ones collected."""

import json
import shutil
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from pytest_mpi import parallel_assert

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import base_job, complete_checkpoints, hpc_ctr, losses_by_step, ok, summary, write_criteo, write_job
from accept_common import TinyWideNet

from hpc_ctr import api, config
from hpc_ctr.checkpoint import state
from hpc_ctr.checkpoint.save import save
from hpc_ctr.comm.session import Session
from hpc_ctr.data.source import open_source
from hpc_ctr.errors import HpcCtrError, StorageError, UsageError
from hpc_ctr.storage.segment import live_rows
from hpc_ctr.train.evaluate import evaluate
from hpc_ctr.train.job import Job

PASS = 5
TABLES = [{"name": "tail", "fields": ["C20", "C21"], "optimizer": "rowwise_adagrad"}]


class TinyTwo(TinyWideNet):
    """TinyWideNet over two tables of one dim."""

    def forward(self, dense, vectors, first=None):
        """See TinyNet."""
        import torch

        return super().forward(dense, (torch.cat(vectors, 1),), first)

    def __init__(self, spec, hidden: int = 6):
        from accept_common import plain_spec

        super().__init__(plain_spec(spec.num_dense, sum(len(t.fields) for t in spec.tables), spec.tables[0].dim,
                                    str(spec.dtype)), hidden)


def job_of(folder: Path, clicks: Path, **sections) -> dict:
    """A checkpoint after every pass of 5 steps; two tables; merges through MPI, which takes any communicator."""
    merged = {"merge": {"backend": "mpi", "k": 4}, "rows": {"replica": "rank", "k_rows": 5},
              "model": {"name": "test_checkpoint:TinyTwo", "hidden": 8}, "embedding": {"tables": TABLES},
              "train": {"batches_per_pass": PASS, "log_every": 1, "max_steps": 4 * PASS},
              "checkpoint": {"every_passes": 1, "keep": 9}, "storage": {"host_budget": "32MiB"}}
    for name, values in sections.items():
        merged[name] = {**merged[name], **values} if isinstance(merged.get(name), dict) else values
    return base_job(folder, clicks, **merged)


def alone() -> Session:
    """This process as a job of one rank."""
    return Session(MPI.COMM_SELF, 0, 1)


def step_folder(run: Path, step: int) -> Path:
    return state.folder_of(run / "checkpoints", step)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "clicks.tsv"
    write_criteo(path, 4000, 300, seed=4)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, clicks) -> Path:
    """The run folder of one rank: checkpoints after 5, 10, 15 and 20 steps, the last of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    assert api.train(config.from_dict(job_of(folder, clicks)), session=alone()) == 0
    return folder / "run"


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A copy of that run folder, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


# ---------------------------------------------------------------- any rank count


def stored_rows(folder: Path) -> dict[str, dict[int, bytes]]:
    """table -> key -> record and step count, as the checkpoint's segments hold them."""
    out = {}
    for table, ranks in state.read_manifest(folder).segments.items():
        rows = out.setdefault(table, {})
        for files in ranks:
            for keys, records, t in live_rows([str(folder.parent / "pool" / file) for file in files]) if files else ():
                rows |= {int(k): r.tobytes() + n.tobytes() for k, r, n in zip(keys, records, t)}
    return out


def held_rows(job: Job) -> dict[str, dict[int, bytes]]:
    """The same of all ranks' stores. Collective."""
    mine = {table.name: {int(k): r.tobytes() + n.tobytes() for keys, records, t in store.iterate()
                         for k, r, n in zip(keys, records, t)} for table, store in zip(job.tables, job.stores)}
    everyone = job.session.comm.allgather(mine)
    assert sum(len(rows[name]) for rows in everyone for name in rows) == sum(
        len({key for rows in everyone for key in rows[name]}) for name in mine), "a row has two owners"
    return {name: {key: row for rows in everyone for key, row in rows[name].items()} for name in mine}


def carried_over(source: Path, target: Path, tree: dict, comm, scratch: Path) -> tuple[float, str]:
    """Open a checkpoint on ``comm`` and save it again below ``target``. Returns test AUC and what went wrong."""
    session = Session(comm, comm.rank, comm.size)
    built = config.from_dict(tree)
    manifest = state.read_manifest(source)
    test = open_source(built.data, built.seed, comm, "test")
    with Job(built, session, test.num_dense, [f.name for f in test.fields], scratch / str(comm.rank)) as job:
        api._restore(job, source, manifest, resume_training=True)
        wrong = "" if held_rows(job) == stored_rows(source) else f"other rows on {comm.size} ranks"
        auc = evaluate(job, test).auc()
        if held_rows(job) != stored_rows(source):
            wrong += "; evaluation changed rows"
        arrays = {f"dense.{name}": value for name, value in job.optimizer.worker_state().items()}
        arrays["stats"] = np.zeros(3)
        manifest.ranks, manifest.segments = comm.size, {}
        save(target, comm, manifest, arrays, {t.name: s for t, s in zip(job.tables, job.stores)}, 2)
    return auc, wrong


def rest(comm) -> None:
    """A barrier at which ranks sleep: those that wait for others must not take their CPUs."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.02)


@pytest.mark.parallel(4)
def test_rows_and_auc_survive_1_2_3_4_1_ranks(tmp_path_factory):
    """The rows of the checkpoint are the same bits on every rank count, and so are the predictions."""
    world = MPI.COMM_WORLD
    shared = Path(world.bcast(str(tmp_path_factory.mktemp("chain"))))
    clicks = shared / "clicks.tsv"
    if world.rank == 0:
        write_criteo(clicks, 4000, 300, seed=4)
        api.train(config.from_dict(job_of(shared, clicks)), session=alone())
    rest(world)
    tree = job_of(shared, clicks)
    source = step_folder(shared / "run", 3 * PASS)
    first = stored_rows(source)
    aucs, problems = [], []
    for turn, ranks in enumerate((1, 2, 3, 4, 1)):
        part = world.Split(world.rank < ranks, world.rank)
        target = shared / f"turn{turn}"
        if world.rank < ranks:
            auc, wrong = carried_over(source, target, tree, part, shared / f"store{turn}")
            aucs.append(auc)
            problems += [wrong] * bool(wrong)
        rest(world)
        part.Free()
        source = state.folder_of(target, 3 * PASS)
        if stored_rows(source) != first:
            problems.append(f"other rows were saved by {ranks} ranks")
    everyone = world.gather((aucs, problems))
    if world.rank == 0:
        problems = [line for _, lines in everyone for line in lines]
        found = [auc for each, _ in everyone for auc in each]
        if len(found) != 11 or max(found) - min(found) > 1e-9 or not 0.5 < found[0] < 1:
            problems.append(f"AUC {found}")
        if sum(map(len, first.values())) < 1000 or set(first) != {"default", "tail"}:
            problems.append("too few rows to tell anything")
    problems = world.bcast(problems)
    parallel_assert(not problems, msg="\n".join(problems))


def test_training_goes_on_on_another_rank_count_from_the_command_line(trained, clicks, tmp_path):
    """From one rank to two and back; then the last checkpoint is as good on one rank as two said."""
    run = tmp_path / "on2"
    job = write_job(tmp_path / "job.yaml", job_of(tmp_path, clicks))
    source = step_folder(trained, PASS)
    ended = ok(hpc_ctr("train", job, "--run_dir", run, "--resume", source, "--train.max_steps", 3 * PASS, ranks=2))
    assert f"continuing from {source}" in ended.stdout + ended.stderr
    told = summary(run)
    assert told["ranks"] == 2 and told["steps"] == 3 * PASS and 0.4 < told["test_auc"] < 1
    assert sorted(losses_by_step(run)) == list(range(PASS + 1, 3 * PASS + 1))
    assert evaluated(run)["auc"] == pytest.approx(told["test_auc"], abs=1e-9)
    manifest = state.read_manifest(step_folder(run, 2 * PASS))
    assert (manifest.ranks, manifest.step, manifest.finished) == (2, 2 * PASS, False)
    back = config.from_dict(job_of(tmp_path, clicks, run_dir=str(tmp_path / "back")))
    assert api.train(back, str(step_folder(run, 2 * PASS)), alone()) == 0
    assert 0.4 < summary(tmp_path / "back")["test_auc"] < 1


@pytest.mark.parallel(2)
def test_samples_are_trained_once_whatever_the_rank_count(tmp_path_factory):
    """A whole epoch, begun on one rank and ended on two, has every sample once."""
    world = MPI.COMM_WORLD
    shared = Path(world.bcast(str(tmp_path_factory.mktemp("epoch"))))
    clicks = shared / "clicks.tsv"
    if world.rank == 0:
        write_criteo(clicks, 2500, 100, seed=6)
        whole = job_of(shared, clicks, train={"max_steps": 0})
        api.train(config.from_dict(whole), session=alone())
    world.Barrier()
    again = job_of(shared, clicks, train={"max_steps": 0}, run_dir=str(shared / "again"))
    code = api.train(config.from_dict(again), resume=str(step_folder(shared / "run", 2 * PASS)),
                     session=Session(world, world.rank, world.size))
    world.Barrier()
    one, two = (summary(shared / name) for name in ("run", "again"))
    parallel_assert(code == 0 and one["samples"] == two["samples"] > 2000 and two["steps"] < one["steps"])
    parallel_assert(abs(one["test_auc"] - two["test_auc"]) < 0.05 and one["test_samples"] == two["test_samples"])


# ---------------------------------------------------------------- damage


def complaint(call, *args, kind=HpcCtrError) -> str:
    """The one sentence with which ``call`` ends."""
    with pytest.raises(kind) as caught:
        call(*args)
    said = str(caught.value)
    assert "\n" not in said and len(said) > 20
    return said


def evaluated(where: Path) -> dict:
    return api.evaluate(str(where), {}, alone())


def test_undamaged_copy_evaluates_as_the_run_said(copied):
    told = summary(copied)
    got = evaluated(copied)
    assert got["auc"] == told["test_auc"] and got["samples"] == told["test_samples"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": 99}', "\x00\x01", '"x"'])
def test_damaged_checkpoint_json(copied, text):
    path = step_folder(copied, 4 * PASS) / "checkpoint.json"
    path.write_text(text)
    assert str(path) in complaint(evaluated, copied, kind=StorageError)


@pytest.mark.parametrize("name, value", [("segments", None), ("segments", {}), ("segments", {"default": 3, "tail": []}),
                                         ("tables", "x"), ("ranks", "two"), ("order", None), ("step", -1)])
def test_checkpoint_json_with_a_wrong_entry(copied, clicks, tmp_path, name, value):
    folder = step_folder(copied, 3 * PASS)
    path = folder / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    built = config.from_dict(job_of(tmp_path, clicks))
    assert str(path) in complaint(api.train, built, str(folder), alone(), kind=StorageError)


def test_missing_segment(copied):
    folder = step_folder(copied, 4 * PASS)
    segment = copied / "checkpoints" / "pool" / state.read_manifest(folder).segments["tail"][0][0]
    segment.unlink()
    said = complaint(evaluated, copied, kind=StorageError)
    assert str(segment) in said and "missing" in said


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_segment_that_was_cut_short(copied, keep):
    folder = step_folder(copied, 4 * PASS)
    segment = copied / "checkpoints" / "pool" / state.read_manifest(folder).segments["default"][0][0]
    whole = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(whole[:int(keep * len(whole)) if isinstance(keep, float) else keep])
    assert segment.name in complaint(evaluated, copied, kind=StorageError)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped"])
def test_damaged_arrays_of_a_rank(copied, damage):
    path = step_folder(copied, 4 * PASS) / "rank-0000.npz"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        at = len(whole) // 2
        path.write_bytes({"empty": b"", "cut": whole[:at],
                          "flipped": whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1:]}[damage])
    assert str(path) in complaint(evaluated, copied, kind=StorageError)


def test_a_damaged_checkpoint_names_the_one_before_it(copied, clicks, tmp_path):
    before = step_folder(copied, 3 * PASS)
    (step_folder(copied, 4 * PASS) / "rank-0000.npz").write_bytes(b"junk")
    said = complaint(evaluated, copied, kind=StorageError)
    assert said.endswith(f"--resume {before}") and "pickle" not in said
    (step_folder(copied, 4 * PASS) / "checkpoint.json").write_text("{")
    assert complaint(evaluated, copied, kind=StorageError).endswith(f"--resume {before}")
    assert 0 < evaluated(before)["auc"] < 1


def test_without_done_a_folder_is_no_checkpoint(copied, clicks, tmp_path):
    last, before = step_folder(copied, 4 * PASS), step_folder(copied, 3 * PASS)
    (last / "DONE").unlink()
    assert state.find(copied) == state.find(copied / "checkpoints") == before and state.find(before) == before
    said = complaint(evaluated, last, kind=UsageError)
    assert str(last) in said and "DONE" in said
    for folder in state.complete(copied / "checkpoints"):
        (folder / "DONE").unlink()
    assert "no complete checkpoint" in complaint(evaluated, copied, kind=UsageError)
    built = config.from_dict(job_of(tmp_path, clicks))
    assert "no complete checkpoint" in complaint(api.train, built, str(copied), alone(), kind=UsageError)


def test_damage_on_the_command_line_is_one_line_and_exit_code_1(copied):
    (step_folder(copied, 4 * PASS) / "checkpoint.json").write_text("{")
    done = hpc_ctr("evaluate", copied, ranks=2)
    lines = [line for line in done.stderr.splitlines() if "hpc-ctr: error" in line]
    assert done.returncode == 1 and len(lines) == 1 and "checkpoint.json" in lines[0], done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_in_the_arrays_can_run_code(copied):
    path = step_folder(copied, 4 * PASS) / "rank-0000.npz"
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["dense.x"] = np.array([{"an": "object"}], object)
    np.savez(path, **arrays)
    assert str(path) in complaint(evaluated, copied, kind=StorageError)


# ---------------------------------------------------------------- another job


@pytest.mark.parametrize("change, said", [
    ({"embedding": {"tables": TABLES, "dim": 8}}, "dim"),
    ({"embedding": {"tables": TABLES, "optimizer": "rowwise_adagrad"}}, "optimizer"),
    ({"embedding": {"tables": TABLES, "dtype": "float64"}}, "dtype"),
    ({"embedding": {"tables": []}}, "embedding"),
    ({"embedding": {"tables": [{**TABLES[0], "fields": ["C20"]}]}}, "fields"),
    ({"embedding": {"tables": [{**TABLES[0], "name": "other"}]}}, "name"),
    ({"model": {"hidden": 9}}, "model"),
])
def test_resume_with_another_job_is_a_usage_error(trained, clicks, tmp_path, change, said):
    built = config.from_dict(job_of(tmp_path, clicks, **change))
    message = complaint(api.train, built, str(step_folder(trained, PASS)), alone(), kind=UsageError)
    assert said in message and "checkpoint" in message


def test_resume_with_another_job_on_the_command_line(trained, clicks, tmp_path):
    job = write_job(tmp_path / "job.yaml", job_of(tmp_path, clicks))
    done = hpc_ctr("train", job, "--resume", step_folder(trained, PASS), "--embedding.dim", 8, ranks=2)
    lines = [line for line in done.stderr.splitlines() if "hpc-ctr: error" in line]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert not complete_checkpoints(tmp_path / "run")


# ---------------------------------------------------------------- what stays


def named_segments(root: Path) -> set[str]:
    """Pool files that complete checkpoints name."""
    return {file for folder in state.complete(root) for ranks in state.read_manifest(folder).segments.values()
            for files in ranks for file in files}


def in_pool(root: Path) -> set[str]:
    return {path.name for path in (root / "pool").iterdir()}


def test_old_checkpoints_are_collected(clicks, tmp_path):
    """Of four checkpoints two stay, and of the pool what they name (test_checkpoint_pool.py has more of that)."""
    root = tmp_path / "run" / "checkpoints"
    assert api.train(config.from_dict(job_of(tmp_path, clicks, checkpoint={"keep": 2})), session=alone()) == 0
    assert {path.name for path in root.iterdir()} == {"pool", "step-000000015", "step-000000020"}
    assert [folder.name for folder in state.complete(root)] == ["step-000000015", "step-000000020"]
    assert in_pool(root) == named_segments(root)


def save_nothing(root: Path, step: int, keep: int = 2) -> Path:
    """A checkpoint without tables."""
    entries = {f.name: 0 for f in fields(state.Manifest) if f.name != "format"}
    empty = {"tables": [], "order": {}, "segments": {}, "bytes": {}, "tiers": {}, "exchanges": {}}
    manifest = state.Manifest(**entries | empty | {"step": step, "ranks": 1})
    return save(root, MPI.COMM_SELF, manifest, {"dense.x": np.ones(3)}, {}, keep).folder


def test_what_a_crash_left_is_removed_and_segments_in_use_stay(tmp_path):
    root = tmp_path / "checkpoints"
    save_nothing(root, 5)
    (root / "step-000000007.partial").mkdir()
    (root / "step-000000007.partial" / "rank-0000.npz").write_bytes(b"half")
    (root / "step-000000006").mkdir()
    (root / "pool" / "abc.h5").write_bytes(b"named by nobody")
    (root / "notes.txt").write_text("mine")
    save_nothing(root, 7)
    assert {path.name for path in root.iterdir()} == {"pool", "step-000000005", "step-000000007", "notes.txt"}
    assert in_pool(root) == set()


def test_saving_a_step_again_replaces_it(tmp_path):
    folder = save_nothing(tmp_path, 5)
    (folder / "old").touch()
    assert save_nothing(tmp_path, 5) == folder and not (folder / "old").exists() and (folder / "DONE").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_course_that_was_given_up_does_not_outlive_the_new_one(tmp_path, keep):
    """Resumed from step 5, a run saves step 10: steps 20 and 30 of the former course are not its last ones."""
    for step in (5, 20, 30):
        save_nothing(tmp_path, step, keep=9)
    folder = save_nothing(tmp_path, 10, keep)
    assert folder.exists() and state.find(tmp_path) == folder


def test_run_folder_finds_checkpoints_that_lie_elsewhere(clicks, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    built = config.from_dict(job_of(tmp_path, clicks, checkpoint={"dir": str(elsewhere)}, train={"max_steps": PASS}))
    api.train(built, session=alone())
    assert not (tmp_path / "run" / "checkpoints").exists() and state.complete(elsewhere)
    assert evaluated(tmp_path / "run")["auc"] == summary(tmp_path / "run")["test_auc"]
