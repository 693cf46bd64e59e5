"""Merges that grow apart, go on beside a step, or are between nodes: against a serial program, with 1 to 4 ranks."""

import itertools

import numpy as np
import pytest
import torch
from mpi4py import MPI
from pytest_mpi import parallel_assert
from test_optim_kstep import BETAS, EPS, LR, SIZE, STEPS, TOLERANCE, Model, bits, gradient, run, who_has_samples

from hpc_ctr.comm.allreduce import MpiAllreduce, SerialAllreduce, _load_horovod, make_allreduce
from hpc_ctr.comm.session import Session, group_of
from hpc_ctr.comm.trace import Trace, link_classes, total
from hpc_ctr.errors import DataError, UsageError
from hpc_ctr.optim.build import make_dense_optimizer, make_mergers
from hpc_ctr.optim.flat import combine_worker_states
from hpc_ctr.optim.kstep import KStepAdam
from hpc_ctr.optim.options import DenseOptions, MergeOptions
from hpc_ctr.optim.schedule import merge_is_due, window
from hpc_ctr.optim.sync import SyncAdam

COMM = MPI.COMM_WORLD
RANKS = pytest.mark.parallel([1, 2, 3, 4])
SEVERAL = pytest.mark.parallel([2, 3, 4])
QUIET = {torch.float32: 0.05, torch.float64: 0.0}
CASES = ("even", "holes", "dry")


# ---------------------------------------------------------------- the serial program


def serial(samples: np.ndarray, nodes: list[list[int]], due, mode: str, guard: bool, correct: bool, overlap: bool,
           quiet: float) -> dict:
    """The method in float64, from its definition. nodes: the ranks of every worker; due: of the global step."""
    workers = [dict(x=np.linspace(-0.5, 0.5, SIZE), m=np.zeros(SIZE), v=np.zeros(SIZE), t=0, moved=False) for _ in nodes]
    b1, b2 = BETAS
    state = {"vhat": None, "merges": 0, "late": None}

    def second(w):
        return w["v"] / (1 - b2 ** w["t"]) if correct else w["v"]

    def means():
        active = [w for w in workers if w["moved"]]
        for w in workers:
            w["moved"] = False
        state["merges"] += 1
        return np.mean([w["x"] for w in active], axis=0), np.mean([second(w) for w in active], axis=0)

    def take(cbar):
        first = mode == "adam" or state["vhat"] is None
        state["vhat"] = cbar if first else np.maximum(state["vhat"], cbar)

    def correction():
        if state["late"] is not None:
            mean, cbar, own = state["late"]
            for w, x in zip(workers, own):
                w["x"] = w["x"] + (mean - x)
            take(cbar)
            state["late"] = None

    def merge():
        mean, cbar = means()
        for w in workers:
            w["x"] = mean.copy()
        take(cbar)

    for step in range(1, len(samples) + 1):
        for w, ranks in zip(workers, nodes):
            share = samples[step - 1, ranks] / max(1, samples[step - 1, ranks].sum())
            if not share.any():
                continue
            g = sum(part * gradient(rank, step, w["x"], quiet) for part, rank in zip(share, ranks))
            w["t"] += 1
            w["m"] = b1 * w["m"] + (1 - b1) * g
            w["v"] = b2 * w["v"] + (1 - b2) * g * g
            c, vhat = second(w), state["vhat"]
            d = c if vhat is None else np.maximum(c, vhat) if guard else vhat
            w["x"] = w["x"] - LR * (w["m"] / (1 - b1 ** w["t"]) if correct else w["m"]) / (np.sqrt(d) + EPS)
            w["moved"] = True
        correction()
        if due(step) and any(w["moved"] for w in workers):
            if overlap:
                own = [w["x"].copy() for w in workers]
                state["late"] = (*means(), own)
            else:
                merge()
    correction()
    if any(w["moved"] for w in workers):
        merge()
    return {"workers": workers, **state}


def build(options: MergeOptions, nodes: list[list[int]], dtype, trace: Trace | None = None):
    """(model, optimizer) on COMM with these nodes."""
    session = Session(COMM, COMM.rank, COMM.size)
    session.__dict__["nodes"] = nodes  # what hosts would say
    trace = trace or Trace(link_classes([0] * COMM.size, COMM.rank))
    model = Model(dtype)
    mergers = make_mergers(options, session, trace)
    dense = DenseOptions(lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS)
    return model, make_dense_optimizer(model.named_parameters(), dense, options, mergers), mergers


def steps(model, optimizer, samples: np.ndarray, begin: int = 0, end: int = STEPS) -> None:
    run(model, optimizer, samples, begin, end, rank=COMM.rank)


def difference(options: MergeOptions, nodes: list[list[int]], dtype, case: str) -> str:
    samples = who_has_samples(case, COMM.size)
    by_rank = [[rank] for rank in range(COMM.size)]
    members = nodes if options.dense_workers == "node" else by_rank

    def due(step):
        if step <= options.warmup_steps:
            return True
        k = options.k
        if options.grow_steps:
            k = min(k, options.k_start * 2 ** ((step - options.warmup_steps - 1) // options.grow_steps))
        return step % k == 0

    want = serial(samples, members, due, options.mode, options.guard, options.bias_correction, options.overlap,
                  QUIET[dtype])
    model, optimizer, _ = build(options, nodes, dtype)
    steps(model, optimizer, samples)
    optimizer.finish()
    if len(set(COMM.allgather(bits(optimizer.x) + bits(optimizer.vhat)))) > 1:
        return "x and vhat differ between ranks at the end"
    mine = want["workers"][next(i for i, node in enumerate(members) if COMM.rank in node)]
    for name, got, expected in (("x", optimizer.x, mine["x"]), ("m", optimizer.m, mine["m"]),
                                ("v", optimizer.v, mine["v"]), ("vhat", optimizer.vhat, want["vhat"])):
        error = np.abs(got.numpy() - expected) / np.maximum(1, np.abs(expected))
        if error.max() > TOLERANCE[dtype]:
            return f"{name} is off by {error.max()}"
    if (optimizer.t, optimizer.merges) != (mine["t"], want["merges"]):
        return f"t {optimizer.t} of {mine['t']}, merges {optimizer.merges} of {want['merges']}"
    return ""


def nodes_of(ranks: int) -> list[list[list[int]]]:
    """Ways to deal ranks to nodes, uneven ones too."""
    return {1: [[[0]]], 2: [[[0, 1]], [[0], [1]]], 3: [[[0, 1], [2]], [[0], [1, 2]]],
            4: [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 2], [1, 3]]]}[ranks]


# ---------------------------------------------------------------- against it


@RANKS
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_overlap_equals_the_serial_program(backend, dtype):
    if backend == "horovod" and _load_horovod()[0] is None:
        pytest.skip("Horovod is not installed")
    found = []
    for i, (k, mode, guard, correct) in enumerate(itertools.product((1, 3, 20), ("adam", "amsgrad"), (True, False),
                                                                    (True, False))):
        case = CASES[(i + i // 3) % 3]
        options = MergeOptions(k=k, mode=mode, guard=guard, bias_correction=correct, overlap=True, backend=backend)
        if text := difference(options, [list(range(COMM.size))], dtype, case):
            found.append(f"{options} {case}: {text}")
    parallel_assert(not found, msg=str(found[:3]))


@RANKS
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nodes_as_workers_equal_the_serial_program(dtype):
    found = []
    for i, (nodes, k, mode, overlap) in enumerate(itertools.product(nodes_of(COMM.size), (1, 3, 20), ("adam", "amsgrad"),
                                                                    (False, True))):
        case = CASES[(i + i // 3) % 3]
        options = MergeOptions(k=k, mode=mode, overlap=overlap, dense_workers="node")
        if text := difference(options, nodes, dtype, case):
            found.append(f"{options} {nodes} {case}: {text}")
    parallel_assert(not found, msg=str(found[:3]))


@RANKS
@pytest.mark.parametrize("route", ["flat", "nodes"])
def test_growing_k_and_warm_up_equal_the_serial_program(route):
    found = []
    for nodes, (k, k_start, grow, warmup), overlap in itertools.product(
            nodes_of(COMM.size), ((20, 1, 7, 0), (6, 2, 5, 4), (20, 1, 0, 10)), (False, True)):
        options = MergeOptions(k=k, k_start=k_start, grow_steps=grow, warmup_steps=warmup, overlap=overlap, route=route,
                               backend="auto" if route == "nodes" else "mpi")
        if text := difference(options, nodes, torch.float64, "holes"):
            found.append(f"{options} {nodes}: {text}")
    parallel_assert(not found, msg=str(found[:3]))


def test_k_grows_by_doubling_until_it_is_k():
    ks = [window(step, 20, 1, 10, 5) for step in range(1, 80)]
    assert ks[:5] == [1] * 5 and ks[5:15] == [1] * 10 and ks[15:25] == [2] * 10
    assert sorted(set(ks)) == [1, 2, 4, 8, 16, 20] and ks == sorted(ks)
    assert {window(10 ** 9, 20, 1, 10), window(3, 20)} == {20}
    assert [step for step in range(1, 50) if merge_is_due(step, 20)] == [20, 40]


# ---------------------------------------------------------------- what a merge promises


@SEVERAL
@pytest.mark.parametrize("overlap", [False, True])
def test_m_and_v_stay_apart_and_amsgrad_never_falls(overlap):
    """After every merge vhat is the same bits on all ranks, x too without overlap; m and v differ."""
    model, optimizer, _ = build(MergeOptions(k=3, mode="amsgrad", overlap=overlap, backend="mpi"),
                                [list(range(COMM.size))], torch.float32)
    samples = who_has_samples("even", COMM.size)
    before, fell = optimizer.vhat.clone(), False
    for step in range(1, STEPS + 1):
        steps(model, optimizer, samples, step - 1, step)
        fell |= bool((optimizer.vhat < before).any())
        before = optimizer.vhat.clone()
        if step > 3 and step % 3 == int(overlap):  # a merge was applied in this step
            told = COMM.allgather(tuple(bits(getattr(optimizer, name)) for name in ("vhat", "x", "m", "v")))
            vhats, xs, ms, vs = (len(set(column)) for column in zip(*told))
            parallel_assert(vhats == 1 and ms == vs == COMM.size and (xs == 1) == (not overlap), msg=str((vhats, xs)))
    parallel_assert(optimizer.merges == STEPS // 3 and not fell, msg=str((optimizer.merges, fell)))


@RANKS
@pytest.mark.parametrize("stop", [20, 21, 23])
@pytest.mark.parametrize("overlap, mode", [(True, "adam"), (True, "amsgrad"), (False, "adam")])
def test_going_on_from_a_saved_state_gives_the_same_bits(stop, overlap, mode):
    """20 and 21: just when a merge has begun, and just after it was applied; 23: in mid-window."""
    options = MergeOptions(k=5, overlap=overlap, mode=mode, k_start=1, grow_steps=9, backend="mpi")
    nodes, samples = [list(range(COMM.size))], who_has_samples("holes", COMM.size)
    model, whole, _ = build(options, nodes, torch.float32)
    steps(model, whole, samples)
    whole.finish()
    model, first, _ = build(options, nodes, torch.float32)
    steps(model, first, samples, 0, stop)
    state = first.worker_state()
    with first.evaluating():
        pass
    again, second, _ = build(options, nodes, torch.float32)
    second.load_worker_state(state)
    steps(again, second, samples, stop)
    steps(model, first, samples, stop)
    for optimizer in (first, second):
        optimizer.finish()
        for name in ("x", "m", "v", "vhat"):
            parallel_assert(bits(getattr(optimizer, name)) == bits(getattr(whole, name)), msg=name)


@SEVERAL
def test_states_with_a_merge_under_way_are_combined():
    options = MergeOptions(k=5, overlap=True, backend="mpi")
    model, optimizer, _ = build(options, [list(range(COMM.size))], torch.float64)
    samples = who_has_samples("even", COMM.size)
    steps(model, optimizer, samples, 0, 20)
    states = COMM.allgather(optimizer.worker_state())
    parallel_assert(all(len(state["late_x"]) == SIZE for state in states))
    combined = combine_worker_states(states)
    with optimizer.evaluating():
        shown = model.flat().detach().clone()
    good = np.allclose(combined["x"], shown.numpy(), rtol=0, atol=1e-13)
    optimizer.finish()
    good &= np.allclose(combined["x"], optimizer.x.numpy(), rtol=0, atol=1e-13)
    good &= np.array_equal(combined["vhat"], optimizer.vhat.numpy()) and bool(combined["has_vhat"])
    sync = SyncAdam(Model(torch.float64).parameters(), LR)
    sync.load_worker_state(combined)
    parallel_assert(good and len(set(COMM.allgather(bits(shown)))) == 1)
    with pytest.raises(UsageError, match="between two merges"):
        sync.load_worker_state(states[0])


@SEVERAL
def test_states_of_nodes_are_combined_once_a_node():
    nodes = nodes_of(COMM.size)[-1]
    model, optimizer, _ = build(MergeOptions(k=20, dense_workers="node"), nodes, torch.float64)
    steps(model, optimizer, who_has_samples("even", COMM.size), 0, 33)
    states = COMM.allgather(optimizer.worker_state())
    combined = combine_worker_states(states)
    leaders = [states[node[0]] for node in nodes]
    for name in ("x", "m", "v"):
        parallel_assert(np.allclose(combined[name], np.mean([s[name] for s in leaders], axis=0), rtol=1e-12, atol=1e-15))


# ---------------------------------------------------------------- values that are not finite


def told(call) -> str:
    try:
        call()
    except DataError as error:
        return str(error)
    return ""


@RANKS
@pytest.mark.parametrize("options, step", [
    (MergeOptions(k=5, backend="mpi"), 5), (MergeOptions(k=5, backend="mpi", overlap=True), 6),
    (MergeOptions(dense="sync", backend="mpi"), 3)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_rank_stops_all_with_its_place(options, step, value):
    model, optimizer, _ = build(options, [list(range(COMM.size))], torch.float32)
    last = COMM.size - 1

    def train():
        for at in range(1, 10):
            optimizer.zero_grad()
            for p in model.parameters():
                p.grad.fill_(0.1)
            if at == 3 and COMM.rank == last:
                list(model.parameters())[2].grad.view(-1)[1] = value
            optimizer.step()

    messages = COMM.allgather(told(train))
    parallel_assert(len(set(messages)) == 1 and "parts.2" in messages[0] and f"step {step} on rank {last}" in messages[0],
                    msg=str(messages))


@SEVERAL
def test_a_sum_that_overflows_is_told_as_such():
    model, optimizer, _ = build(MergeOptions(k=1, backend="mpi", bias_correction=False), [list(range(COMM.size))],
                                torch.float32)
    with torch.no_grad():
        optimizer.x.fill_(3e38)
    optimizer.zero_grad()
    optimizer.merger.sum_, real = (lambda tensors, name: real(tensors, name) if name != "dense_merge" else
                                   (real(tensors, name), tensors[0].mul_(10))), optimizer.merger.sum_
    message = told(optimizer.step)
    parallel_assert("the sum over ranks of the value of parts.0 overflows at step 1" in message, msg=message)


# ---------------------------------------------------------------- the sum by nodes


@SEVERAL
@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000])
def test_sum_by_nodes_equals_the_flat_one(count):
    for nodes in nodes_of(COMM.size):
        trace = Trace(link_classes(group_of(nodes), COMM.rank))
        _, _, mergers = build(MergeOptions(route="nodes"), nodes, torch.float64, trace)
        flat = MpiAllreduce(COMM)
        own = torch.from_numpy(np.random.default_rng(COMM.rank).normal(0, 1, count))
        a, b, c = own.clone(), own.clone(), own.clone()
        mergers.between.sum_([a], "test")
        flat.sum_([b], "test")
        mergers.between.start_([c], "late")()
        parallel_assert(torch.allclose(a, b, rtol=0, atol=1e-6) and bits(a) == bits(c))
        parallel_assert(len(set(COMM.allgather(bits(a)))) == 1)
        far = total(COMM.allgather({p: dict(links) for p, links in trace.bytes.items()}))
        expected = 2 * (len(nodes) - 1) * 8 * count
        between = [far.get(purpose, {}).get("other_node", 0) for purpose in ("test", "late")]
        parallel_assert(between == [expected, expected], msg=f"{nodes}: {between}, not {expected}")


@pytest.mark.parallel(nprocs=4)
def test_auto_takes_the_route_that_sends_less_between_nodes():
    nodes, node_of, far = [[0, 2], [1, 3]], [0, 1, 0, 1], {}
    for route in ("flat", "auto"):
        trace = Trace(link_classes(node_of, COMM.rank))
        _, _, mergers = build(MergeOptions(route=route, backend="mpi"), nodes, torch.float32, trace)
        mergers.between.sum_([torch.ones(1000)], "test")
        far[route] = total(COMM.allgather({"test": dict(trace.bytes["test"])}))["test"]["other_node"]
    parallel_assert(far["auto"] == 2 * 4000 and far["flat"] > 2 * far["auto"] * 0.99, msg=str(far))


@SEVERAL
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_a_sum_under_way_and_another_meanwhile(backend):
    if backend == "horovod" and _load_horovod()[0] is None:
        pytest.skip("Horovod is not installed")
    reduce = make_allreduce(backend, COMM)
    for turn in range(5):
        slow, quick = torch.full((200_000,), float(COMM.rank)), torch.full((3,), float(turn))
        wait = reduce.start_([slow], "slow")
        reduce.sum_([quick], "quick")
        wait()
        wait()
        parallel_assert(bool((slow == sum(range(COMM.size))).all()) and quick[0] == turn * COMM.size)
    parallel_assert(reduce.bytes_by_name["slow"] == 5 * 800_000 and reduce.calls_by_name["slow"] == 5)


@pytest.mark.parametrize("settings, message", [
    ({"k_start": 30, "grow_steps": 5}, "merge.k_start: 30 cannot grow to merge.k 20"),
    ({"warmup_steps": -1}, "merge.warmup_steps: must be at least 0"),
    ({"dense_workers": "host"}, "merge.dense_workers: must be one of rank, node"),
    ({"route": "ring"}, "merge.route: must be one of auto, flat, nodes"),
    ({"route": "nodes", "backend": "horovod"}, "merge.route: nodes sums through MPI"),
    ({"dense_workers": "node", "backend": "horovod"}, "merge.dense_workers: node sums through MPI"),
    ({"overlap": 1}, "merge.overlap: must be true or false, not 1")])
def test_settings_that_are_not_possible(settings, message):
    with pytest.raises(UsageError, match=message):
        MergeOptions(**settings)


def test_parameters_may_come_without_names():
    for params in (Model(torch.float32).parameters(), Model(torch.float32).named_parameters()):
        optimizer = KStepAdam(params, k=1, merger=SerialAllreduce())
        optimizer.x[16] = float("nan")
        with pytest.raises(DataError, match="value of (parts.1|parameter 1) is not finite at step 1 on rank 0"):
            optimizer.step()
