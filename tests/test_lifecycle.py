"""The lifecycle of rows: training equals the oracle, nothing but the settings matters, and they are checked."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import base_job, hpc_ctr, losses_by_step, summary, write_criteo, write_job
from accept_common import NUM_DENSE, by_step, random_batch, rank_batches
from accept_settings import DIM, SAMPLES, Setting, bad_pass_ends, compare
from oracle_lifecycle import Lifecycle, life_as_dict
from test_accept_oracle import field_list, job, reference

from hpc_ctr import api, config
from hpc_ctr.checkpoint import state
from hpc_ctr.cli.settings import settings_help
from hpc_ctr.comm.session import Session
from hpc_ctr.data.keys import default_key
from hpc_ctr.errors import UsageError
from hpc_ctr.kernels.shows import MOST, ROWS
from hpc_ctr.storage.lifecycle import SHARDS, CountFilter, LifecycleOptions, score_due, shards_of, touch, ttl_due
from hpc_ctr.storage.record import LATER, LIFE, RecordLayout
from hpc_ctr.storage.tiered import budget_for
from hpc_ctr.train.evaluate import evaluate
from hpc_ctr.train.job import Job
from hpc_ctr.train.plan import plan_lines

DEFAULTS = [default_key(f.name) for f in field_list()]
SMALL_FILTER = 1 << 17
COUNTS = ("rows_admitted", "shows_held_back", "rows_deleted_ttl", "rows_deleted_score")
MANY = ((900, 1, 1), (900, 1, 1), (900, 1, 4), (900, 0, 2))  # more ids than the oracle would like
EVERYTHING = {"every": 60, "count_filter": 3, "ttl": 120, "show_click_decay_rate": 0.7, "delete_threshold": 0.35,
              "nonclk_coeff": 0.2, "click_coeff": 0.9, "count_filter_reset": 300}


def oracle_of(options: dict) -> Lifecycle:
    """The oracle's lifecycle for settings as users write them."""
    names = {"count_filter_reset": "reset", "show_click_decay_rate": "rate", "delete_threshold": "threshold",
             "nonclk_coeff": "nonclk", "click_coeff": "click"}
    return Lifecycle(DEFAULTS, **{names.get(name, name): value for name, value in options.items()})


def trained(s: Setting, options: dict, mine, comm, **sections):
    """Train with the code under test."""
    options = {"count_filter_bytes": SMALL_FILTER, **options} if options else {}
    tree = job(s) | {"lifecycle": options}
    for name, values in sections.items():
        tree[name] = {**tree[name], **values}
    return api.train_batches(tree, mine, NUM_DENSE, field_list(), comm)


CASES = [
    (Setting(), {"every": 50}),
    (Setting(case="uneven"), {"every": 70, "count_filter": 3}),
    (Setting(case="holes", optimizer="rowwise_adagrad"), {"every": 33, "ttl": 99}),
    (Setting(batches_per_pass=3), {"every": 40, "count_filter": 2, "show_click_decay_rate": 0.5,
                                   "delete_threshold": 0.3}),
    (Setting(case="uneven", dense="sync"), EVERYTHING),
    (Setting("rank", case="starved", k_rows=3), {"every": 50, "count_filter": 4, "ttl": 50}),
    (Setting("rank", case="uneven", k_rows=5, k=5), EVERYTHING),
    (Setting(case="holes", batches_per_pass=100, steps=20), {"every": 5, "count_filter": 255, "delete_threshold": 0.2}),
]


@pytest.mark.parallel([1, 2, 4])
def test_training_equals_the_oracle():
    """Losses, dense part, rows, shows and clicks, and the counters of what was done."""
    comm, problems, done = MPI.COMM_WORLD, [], dict.fromkeys(COUNTS, 0)
    for s, options in CASES:
        per_rank = rank_batches(s.case, comm.size, s.steps, SAMPLES, seed=5)
        got = trained(s, options, per_rank[comm.rank], comm)
        keys, records, t = got.rows()
        parts = comm.gather((list(got.losses), got.dense, (keys, records, t), list(got.pass_ends)))
        lives = comm.gather(life_as_dict(keys, got.life(), DEFAULTS))
        tiers = comm.gather(got.tiers)
        periods = comm.gather(got.periods)
        if comm.rank == 0:
            per_step = by_step(per_rank)
            found = bad_pass_ends(s, parts[0][3], len(per_step), comm.size if s.replica == "rank" else 1)
            found += missed_periods(s, options["every"], per_step, parts[0][3], comm.size)
            life = oracle_of(options)
            want = reference(s, per_step, parts[0][3], lifecycle=life)
            found += compare(s, parts, want, DIM)
            have = {key: row for each in lives for key, row in each.items()}
            if have != life.life:
                wrong = [key for key in have.keys() | life.life.keys() if have.get(key) != life.life.get(key)]
                found.append(f"shows, clicks or last of {len(wrong)} rows: {have.get(wrong[0])} instead of "
                             f"{life.life.get(wrong[0])}")
            for name in COUNTS:
                total = sum(each[name] for each in tiers)
                if total != life.done[name]:
                    found.append(f"{name}: {total} instead of {life.done[name]}")
                if name.startswith("rows_deleted"):
                    logged = sum(period["default"][name] for each in periods for period in each)
                    found += [f"{name} in periods: {logged}"] * (logged != total)
                done[name] += total
            problems += [f"{s.name}, {options}: {line}" for line in found]
    if comm.rank == 0 and not all(done.values()):
        problems.append(f"the settings are too tame: {done}")
    problems = comm.bcast(problems)
    assert not problems, "\n".join(problems)


def missed_periods(s: Setting, every: int, per_step, ends: list[int], ranks: int) -> list[str]:
    """A pass ends with the step that ends a period (between replicas: with the next multiple of k_rows)."""
    samples = np.cumsum([sum(batch.size for batch in step) for step in per_step])
    steps = np.flatnonzero(np.diff(samples // every, prepend=0)) + 1
    if s.replica == "rank" and ranks > 1:
        steps = np.minimum(-(-steps // s.k_rows) * s.k_rows, len(per_step))
    return [f"no pass ends with step {step}, which ends a period" for step in set(steps.tolist()) - set(ends)]


def exact(result) -> list:
    """All bits of a result that settings of memory and passes must not change."""
    keys, records, t = result.rows()
    order = np.argsort(keys)
    life = result.life()[order] if result.layouts[0].lifecycle else np.zeros(0)
    return [np.array(result.losses).tobytes(), result.dense["x"].tobytes(), keys[order].tobytes(),
            records[order].tobytes(), t[order].tobytes(), life.tobytes(),
            {name: result.tiers.get(name) for name in COUNTS}]


@pytest.mark.parallel([1, 2])
def test_pass_length_and_host_budget_change_no_bit():
    comm, s = MPI.COMM_WORLD, Setting(dtype="float32")
    rng = np.random.default_rng(comm.rank)
    mine = [random_batch(rng, int(rng.integers(1, 5)), fields=MANY) for _ in range(130 - comm.rank)]
    n = comm.size
    cases = [EVERYTHING | {"every": 40 * n, "ttl": 80 * n}, {"every": 40 * n, "ttl": 200 * n}]
    for options in cases if n == 1 else cases[:1]:
        least = budget_for(RecordLayout(DIM, 2 * DIM, np.float32, True), 64, 500)
        least += SMALL_FILTER // comm.size if "count_filter" in options else 0
        want = exact(trained(s, options, mine, comm))
        assert sum(comm.allgather(want[-1]["rows_deleted_score"] + want[-1]["rows_deleted_ttl"])) > 0
        for sections in ({"train": {"batches_per_pass": 2}},
                         {"storage": {"host_budget": max(int(least / 0.75) + 100, 60_000)}}):
            got = trained(s, options, mine, comm, **sections)
            assert comm.allgather(exact(got) == want) == [True] * comm.size, sections
        assert min(comm.allgather(got.tiers["cold_hits"])) > 0 or "count_filter" in options, "all rows fit into the cache"


@pytest.mark.parallel([1, 2])
def test_off_changes_nothing():
    """Rows and losses of a lifecycle that counts only are those of a job without one, bit for bit."""
    comm, s = MPI.COMM_WORLD, Setting(dtype="float32")
    mine = rank_batches(s.case, comm.size, 30, SAMPLES, seed=7)[comm.rank]
    off, on = trained(s, {}, mine, comm), trained(s, {"every": 10**9}, mine, comm)
    same = exact(off)[:5] == exact(on)[:5] and not off.layouts[0].lifecycle and "rows_admitted" not in off.tiers
    assert all(comm.allgather(same and (on.life()["last"] == 10**9).all()))


# ---------------------------------------------------------------- the filter and the score


def keys_of(n: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64))


def test_filter_never_counts_too_little_and_rarely_too_much():
    """At 16 and 8 bytes of counters a key (docs/lifecycle.md says so): the share of keys that got in too early."""
    keys = keys_of(40_000)
    shows = np.random.default_rng(1).integers(1, 4, len(keys))
    for bytes_a_key, allowed in ((16, 0.02), (8, 0.12)):
        options = LifecycleOptions(every=1, count_filter=4, count_filter_bytes=bytes_a_key * len(keys))
        counts = CountFilter(options, 0, 1)
        half = shows // 2
        counts.add(keys, half)
        counts.add(keys, shows - half)
        assert not counts.admits(keys).any(), "what was added counts from the next commit on"
        counts.commit()
        early = counts.admits(keys).mean()
        assert 0 < early < allowed
        counts.add(keys, 4 - shows)
        counts.commit()
        assert counts.admits(keys).all()
    counts.add(keys[:9], np.full(9, 10**12))  # counters stop at their largest value
    counts.commit()
    assert counts.counters.max() == MOST and counts.admits(keys).all()


def test_filter_does_not_depend_on_ranks_or_order():
    keys = keys_of(5000)
    shows = np.random.default_rng(2).integers(1, 9, len(keys))
    options = LifecycleOptions(every=1, count_filter=5, count_filter_bytes=1 << 20)
    whole = CountFilter(options, 0, 1)
    whole.add(keys[::-1].copy(), shows[::-1].copy())
    whole.commit()
    for ranks in (2, 3, 7):
        parts = [CountFilter(options, rank, ranks) for rank in range(ranks)]
        for rank, part in enumerate(parts):
            first, behind = shards_of(rank, ranks)
            mine = (keys >> np.uint64(54) >= first) & (keys >> np.uint64(54) < behind)
            part.add(keys[mine], shows[mine])
            part.commit()
            assert (part.admits(keys[mine]) == whole.admits(keys[mine])).all()
            assert options.filter_bytes(rank, ranks) == part.counters.nbytes
        again = CountFilter(options, 0, 1)
        again.load(np.concatenate([part.counters for part in parts]))
        assert (again.counters == whole.counters).all()
        parts[1].load(whole.counters)
        assert (parts[1].counters == whole.counters[shards_of(1, ranks)[0]:shards_of(1, ranks)[1]]).all()
    assert whole.counters.shape[:3] == (SHARDS, 2, ROWS) and whole.counters.nbytes == 1 << 20
    with pytest.raises(UsageError, match="count_filter_bytes"):
        whole.load(np.zeros((SHARDS, 2, ROWS, 17), np.uint8))


def test_score_and_ttl_due():
    """The first end of a period at which the definition says that the row goes, and no earlier one."""
    rng = np.random.default_rng(3)
    for rate, threshold, every in ((0.5, 0.3, 10), (0.98, 0.8, 7), (1.0, 0.5, 3), (0.9, 0.0, 5), (0.999, 0.8, 1)):
        options = LifecycleOptions(every=every, ttl=35, show_click_decay_rate=rate, delete_threshold=threshold)
        life = np.zeros(400, LIFE)
        shows = rng.integers(0, 40, 400)
        touch(life, shows, np.minimum(rng.integers(0, 9, 400), shows), 50 * every, options)
        score = 0.1 * (life["show"] - life["click"].astype(float)) / 256 + life["click"] / 256
        due = score_due(life, options)
        for row_due, s in zip(due.tolist(), score.tolist()):
            decays = (row_due - 50 * every) // every + 1
            if row_due == LATER:
                assert threshold == 0 or (rate == 1 and s >= threshold)
            else:
                assert s * rate ** decays < threshold and (decays == 1 or s * rate ** (decays - 1) >= threshold)
        assert (ttl_due(life, options) == 50 * every + 35).all()


def test_counts_saturate_and_do_not_depend_on_how_they_come():
    options = LifecycleOptions(every=10, show_click_decay_rate=0.7)
    once, twice = np.zeros(3, LIFE), np.zeros(3, LIFE)
    for life in (once, twice):
        touch(life, np.array([1, 5, 10**9]), np.array([0, 3, 10**9]), 10, options)
    touch(once, np.array([7, 1, 10**9]), np.array([2, 1, 1]), 40, options)
    touch(twice, np.array([3, 1, 10**9]), np.array([2, 0, 0]), 40, options)
    touch(twice, np.array([4, 0, 0]), np.array([0, 1, 1]), 40, options)
    assert (once == twice).all() and once["show"].tolist() == [round(256 * 0.343) + 7 * 256, round(5 * 256 * 0.343) + 256,
                                                               2**32 - 1]


# ---------------------------------------------------------------- whole jobs


TABLES = [{"name": "tail", "fields": ["C20", "C21"], "lifecycle": {"count_filter": 1, "ttl": 900}}]
JOB_LIFE = {"every": 300, "count_filter": 3, "count_filter_bytes": SMALL_FILTER, "delete_threshold": 0.25,
            "show_click_decay_rate": 0.8}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "clicks.tsv"
    write_criteo(path, 3000, 300, seed=4)
    return path


def job_of(folder: Path, clicks: Path, **sections) -> dict:
    """Two tables with lifecycles of their own; a checkpoint after each of the passes, some of them inside a period."""
    tree = {"merge": {"backend": "mpi", "k": 4}, "model": {"name": "test_checkpoint:TinyTwo", "hidden": 8},
            "embedding": {"tables": TABLES}, "lifecycle": JOB_LIFE, "data": {"batch_size": 32},
            "train": {"batches_per_pass": 3}, "checkpoint": {"every_passes": 1, "keep": 99},
            "storage": {"host_budget": "4MiB"}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return base_job(folder, clicks, **tree)


def lines_of(run: Path, kind: str) -> list[dict]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


@pytest.mark.parallel([1, 2])
def test_resumed_inside_a_period_a_run_is_the_same(tmp_path_factory):
    """On the same rank count: the same losses, periods and counters, and the same rows as far as the test sees them."""
    comm = MPI.COMM_WORLD
    shared = Path(comm.bcast(str(tmp_path_factory.mktemp("resume"))))
    clicks = shared / "clicks.tsv"
    if comm.rank == 0:
        write_criteo(clicks, 2000, 300, seed=4)
    comm.Barrier()
    session = Session(comm, comm.rank, comm.size)
    assert api.train(config.from_dict(job_of(shared, clicks)), session=session) == 0
    whole = shared / "run"
    comm.Barrier()
    folders = state.complete(whole / "checkpoints")
    inside = [f for f in folders if state.read_manifest(f).samples % 300 > 64]
    folder = inside[len(inside) // 2]
    tree = job_of(shared, clicks, run_dir=str(shared / "again"))
    assert api.train(config.from_dict(tree), str(folder), session) == 0
    comm.Barrier()
    problems = []
    if comm.rank == 0:
        run, at = Path(tree["run_dir"]), state.read_manifest(folder).step
        want = {step: loss for step, loss in losses_by_step(whole).items() if step > at}
        problems += ["losses"] * (losses_by_step(run) != want or len(want) < 10)
        periods = [line for line in lines_of(whole, "lifecycle") if line["step"] > at]
        problems += ["periods"] * (lines_of(run, "lifecycle") != periods or not periods)
        a, b = summary(whole), summary(run)
        problems += [name for name in COUNTS if a["tiers"][name] != b["tiers"][name]]
        problems += ["AUC"] * (a["test_auc"] != b["test_auc"])
        tables = lines_of(whole, "lifecycle")[-1]["tables"]
        if set(tables) != {"default", "tail"} or "filter_counters" in tables["tail"]:
            problems.append(f"tables {tables}")
        tiers = summary(whole)["tiers"]
        if tables["default"]["rows"] + tables["tail"]["rows"] > tiers["rows"] or not all(tiers[n] for n in COUNTS):
            problems.append(f"tiers {tiers}")
    problems = comm.bcast(problems)
    assert not problems, problems


@pytest.mark.parallel(3)
def test_rows_and_counters_survive_other_rank_counts(tmp_path_factory):
    """A checkpoint of one rank, opened on 2 and 3: the same rows with their lives, the same show counters; evaluation
    makes no row and changes none."""
    world = MPI.COMM_WORLD
    shared = Path(world.bcast(str(tmp_path_factory.mktemp("ranks"))))
    clicks = shared / "clicks.tsv"
    if world.rank == 0:
        write_criteo(clicks, 3000, 300, seed=4)
        api.train(config.from_dict(job_of(shared, clicks)), session=Session(MPI.COMM_SELF, 0, 1))
    world.Barrier()
    folder = state.complete(shared / "run" / "checkpoints")[-2]
    manifest = state.read_manifest(folder)
    found = []
    for ranks in (1, 2, 3):
        part = world.Split(world.rank < ranks, world.rank)
        if world.rank < ranks:
            built = config.from_dict(job_of(shared, clicks))
            test = api.open_source(built.data, built.seed, part, "test")
            session = Session(part, part.rank, part.size)
            with Job(built, session, test.num_dense, [f.name for f in test.fields],
                     shared / f"{ranks}-{part.rank}") as opened:
                api._restore(opened, folder, manifest, resume_training=True)
                counters = np.concatenate(part.allgather(opened.lifecycles[0].filter.counters))
                rows = held_rows(opened)
                auc = evaluate(opened, test).auc()
                found.append((counters.tobytes(), rows, held_rows(opened), sum(map(len, rows))))
                assert 0.4 < auc < 1 and opened.lifecycles[1].filter is None
        world.Barrier()
        part.Free()
    same = all(each[0] == found[0][0] and each[1] == found[0][1] == each[2] for each in found)
    assert all(world.allgather(same and found[0][3] > 300 and any(found[0][0])))
    comm_two = world.Split(world.rank < 2, world.rank)
    if world.rank < 2:  # and training goes on
        tree = job_of(shared, clicks, run_dir=str(shared / "two"))
        assert api.train(config.from_dict(tree), str(folder), Session(comm_two, comm_two.rank, 2)) == 0
    world.Barrier()
    comm_two.Free()


def held_rows(opened: Job) -> list[dict[int, bytes]]:
    """Rows of all ranks with lives and step counts, by table. Collective."""
    mine = [{int(k): r.tobytes() + n.tobytes() for keys, rows, t in store.iterate() for k, r, n in zip(keys, rows, t)}
            for store in opened.stores]
    everyone = opened.session.comm.allgather(mine)
    return [{k: row for each in everyone for k, row in each[table].items()} for table in range(len(mine))]


@pytest.mark.parametrize("change, said", [
    ({"lifecycle": {"ttl": 5}}, "lifecycle.ttl: nothing is decided without lifecycle.every"),
    ({"lifecycle": {"every": -1}}, "lifecycle.every"),
    ({"lifecycle": {"every": 10, "count_filter": 256}}, "lifecycle.count_filter: must be a whole number from 0 to 255"),
    ({"lifecycle": {"every": 10, "show_click_decay_rate": 0}}, "lifecycle.show_click_decay_rate"),
    ({"lifecycle": {"every": 10, "show_click_decay_rate": 1.5}}, "lifecycle.show_click_decay_rate"),
    ({"lifecycle": {"every": 10, "delete_threshold": -1}}, "lifecycle.delete_threshold"),
    ({"lifecycle": {"every": 10, "count_filter_bytes": "1KB"}}, "lifecycle.count_filter_bytes"),
    ({"lifecycle": {"every": 10, "count_filter_bytes": "many"}}, "lifecycle.count_filter_bytes"),
    ({"lifecycle": {"evry": 10}}, "did you mean lifecycle.every"),
    ({"embedding": {"tables": [{**TABLES[0], "lifecycle": {"tl": 1}}]}, "lifecycle": {"every": 10}},
     "embedding.tables[0].lifecycle.tl: unknown setting; did you mean ttl"),
    ({"embedding": {"tables": [{**TABLES[0], "lifecycle": {"every": 1}}]}, "lifecycle": {"every": 10}},
     "embedding.tables[0].lifecycle.every"),
    ({"embedding": {"tables": [{**TABLES[0], "lifecycle": 3}]}}, "embedding.tables[0].lifecycle"),
    ({"embedding": {"tables": [{**TABLES[0], "lifecycle": {"ttl": "x"}}]}, "lifecycle": {"every": 10}},
     "embedding.tables[0].lifecycle.ttl"),
])
def test_wrong_settings_are_named(change, said):
    with pytest.raises(UsageError) as caught:
        config.from_dict({"data": {"files": ["x"]}, **change})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_command_line_says(clicks, tmp_path):
    path = write_job(tmp_path / "job.yaml", job_of(tmp_path, clicks))
    done = hpc_ctr("train", path, "--lifecycle.ttl", -4)
    lines = [line for line in done.stderr.splitlines() if "hpc-ctr: error" in line]
    assert done.returncode == 2 and len(lines) == 1 and "lifecycle.ttl" in lines[0], done.stderr
    told, problems = plan_lines(config.load(path), 1)
    assert any("show counters of table default" in line for line in told) and not problems
    with pytest.raises(UsageError, match="does not hold the show counters"):
        plan_lines(config.load(path, {"storage.host_budget": "150KB"}), 1)
    assert "--lifecycle.count_filter" in settings_help()


def test_a_checkpoint_without_a_lifecycle_does_not_fit(clicks, tmp_path):
    off = job_of(tmp_path, clicks, train={"max_steps": 7}, embedding={"tables": [{**TABLES[0], "lifecycle": {}}]},
                 lifecycle={"every": 0, "count_filter": 1, "delete_threshold": 0, "show_click_decay_rate": 1.0})
    alone = Session(MPI.COMM_SELF, 0, 1)
    assert api.train(config.from_dict(off), session=alone) == 0
    for tree, checkpoint in ((job_of(tmp_path, clicks, run_dir=str(tmp_path / "on"), train={"max_steps": 7}), "run"),
                             ({**off, "run_dir": str(tmp_path / "off")}, "on")):
        with pytest.raises(UsageError, match="lifecycle"):
            api.train(config.from_dict(tree), str(tmp_path / "run" if checkpoint == "run" else tmp_path / "on"), alone)
        if checkpoint == "run":
            assert api.train(config.from_dict({**tree, "overwrite": True}), session=alone) == 0
    assert asdict(LifecycleOptions()) == config.to_dict(config.from_dict(base_job(tmp_path, clicks)))["lifecycle"]
