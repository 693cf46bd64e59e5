"""SyncAdam: torch.optim.Adam on one rank, one big worker on several."""

import copy

import numpy as np
import pytest
import torch
from mpi4py import MPI
from pytest_mpi import parallel_assert

from hpc_ctr.comm.allreduce import MpiAllreduce, SerialAllreduce, _load_horovod, make_allreduce
from hpc_ctr.errors import UsageError
from hpc_ctr.optim.kstep import KStepAdam
from hpc_ctr.optim.sync import SyncAdam

COMM = MPI.COMM_WORLD
RANKS = pytest.mark.parallel([2, 3, 4])


def network(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(dtype)


def data(step: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng([7, step])
    x = torch.from_numpy(rng.normal(0, 1, (count, 6))).to(dtype)
    return x, (x[:, :1] > 0).to(dtype)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_one_rank_equals_torch_adam(dtype, tolerance):
    ours, theirs = network(dtype), network(dtype)
    mine = SyncAdam(ours.parameters(), lr=0.003, betas=(0.9, 0.99))
    adam = torch.optim.Adam(theirs.parameters(), lr=0.003, betas=(0.9, 0.99), foreach=False)
    for step in range(400):
        x, y = data(step, 32, dtype)
        for model, optimizer in ((ours, mine), (theirs, adam)):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()
    assert (flat(ours) - flat(theirs)).abs().max() < tolerance
    assert mine.merges == 400 == mine.t and mine.merger.bytes_by_name["dense_grad"] == 400 * mine.merged_bytes


def test_one_worker_that_never_merges_is_adam():
    ours, theirs = network(torch.float64), network(torch.float64)
    pairs = [(ours, KStepAdam(ours.parameters(), lr=0.003, k=1000)),
             (theirs, SyncAdam(theirs.parameters(), lr=0.003))]
    for step in range(100):
        x, y = data(step, 32, torch.float64)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()
    assert (flat(ours) - flat(theirs)).abs().max() < 1e-13


@RANKS
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_ranks_equal_one_big_worker(backend):
    """Shares of very different size, ranks without samples, and steps in which nobody has any."""
    if backend == "horovod" and _load_horovod()[0] is None:
        pytest.skip("Horovod is not installed")
    merger = make_allreduce(backend, COMM)
    ours, whole = network(torch.float64), network(torch.float64)
    mine, big = SyncAdam(ours.parameters(), lr=0.003, merger=merger), SyncAdam(whole.parameters(), lr=0.003)
    exchanged = 0
    for step in range(40):
        samples = np.random.default_rng(step).integers(0, 12, COMM.size)
        samples[step % COMM.size] = 0
        samples *= step % 9 != 4
        exchanged += samples.any()
        x, y = data(step, int(samples.sum()), torch.float64)
        ends = np.cumsum(samples)
        part = slice(int(ends[COMM.rank] - samples[COMM.rank]), int(ends[COMM.rank]))
        for model, optimizer, rows in ((ours, mine, part), (whole, big, slice(None))):
            optimizer.zero_grad()
            if len(x[rows]):
                torch.nn.functional.binary_cross_entropy_with_logits(model(x[rows]), y[rows]).backward()
        mine.step(samples)
        big.step(np.array([samples.sum()]))
    parallel_assert((flat(ours) - flat(whole)).abs().max() < 1e-12)
    parallel_assert(len(set(COMM.allgather(flat(ours).numpy().tobytes()))) == 1)
    parallel_assert(mine.t == exchanged == mine.merges < mine.global_step == 40)
    parallel_assert(merger.bytes_by_name["dense_grad"] == exchanged * mine.merged_bytes and not mine.finish())


@RANKS
def test_resume_is_bit_exact_and_evaluating_is_free():
    merger = MpiAllreduce(COMM)
    model = network(torch.float32)
    optimizer = SyncAdam(model.parameters(), lr=0.01, merger=merger)

    def train(model, optimizer, steps):
        for step in steps:
            x, y = data(step * COMM.size + COMM.rank, 8, torch.float32)
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step(np.full(COMM.size, 8))

    train(model, optimizer, range(10))
    state = copy.deepcopy(optimizer.worker_state())
    with optimizer.evaluating():
        parallel_assert(torch.equal(flat(model), torch.from_numpy(state["x"])))
    parallel_assert("eval" not in merger.bytes_by_name)
    train(model, optimizer, range(10, 20))
    other = network(torch.float32)
    again = SyncAdam(other.parameters(), lr=0.01, merger=MpiAllreduce(COMM))
    again.load_worker_state(state)
    train(other, again, range(10, 20))
    parallel_assert(torch.equal(flat(other), flat(model)) and again.t == optimizer.t == 20)


def test_refuses_a_state_between_merges():
    model = network(torch.float32)
    kstep = KStepAdam(model.parameters(), k=5, merger=SerialAllreduce())
    kstep.step()
    with pytest.raises(UsageError, match="combine the states first"):
        SyncAdam(network(torch.float32).parameters()).load_worker_state(kstep.worker_state())
