"""Sums over ranks: exact bits, counters, and which library carries them."""

import numpy as np
import pytest
import torch
from mpi4py import MPI
from pytest_mpi import parallel_assert

from hpc_ctr.comm import allreduce
from hpc_ctr.comm.allreduce import HorovodAllreduce, MpiAllreduce, SerialAllreduce, make_allreduce
from hpc_ctr.errors import UsageError

COMM = MPI.COMM_WORLD
RANKS = pytest.mark.parallel([2, 3, 4])


def make(backend: str):
    """The backend over all ranks; skips where Horovod is not installed."""
    if backend == "horovod" and allreduce._load_horovod()[0] is None:
        pytest.skip("Horovod is not installed")
    return make_allreduce(backend, COMM)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different size, so that another order of summation gives other bits."""
    rng = np.random.default_rng([rank, count])
    return torch.from_numpy(rng.normal(0, 1, count) * 10.0 ** rng.integers(-6, 7, count)).to(dtype)


def in_rank_order(count: int, dtype: torch.dtype) -> torch.Tensor:
    total = values(0, count, dtype)
    for rank in range(1, COMM.size):
        total = total + values(rank, count, dtype)
    return total


def same_on_all(tensor: torch.Tensor) -> bool:
    return len(set(COMM.allgather(tensor.numpy().tobytes()))) == 1


def test_serial_keeps_values_and_counts():
    reduce = make_allreduce("auto", None)
    assert isinstance(reduce, SerialAllreduce) and (reduce.rank, reduce.size) == (0, 1)
    x = values(0, 10, torch.float32)
    before = x.clone()
    reduce.sum_([x, torch.zeros(3, dtype=torch.float64)], "a")
    reduce.sum_([x], "a")
    assert torch.equal(x, before)
    assert reduce.bytes_by_name == {"a": 40 + 24 + 40} and reduce.calls_by_name == {"a": 2}
    assert reduce.seconds >= 0


def test_pieces_cover_everything_once():
    flats = [torch.arange(5), torch.arange(5, 6), torch.arange(6, 17)]
    for limit in (1, 2, 5, 16, 17, 100):
        pieces = list(allreduce._pieces(flats, limit))
        assert torch.equal(torch.cat([part for piece in pieces for part in piece]), torch.arange(17))
        assert all(sum(part.numel() for part in piece) == limit for piece in pieces[:-1])


def test_refuses_what_it_cannot_sum():
    reduce = SerialAllreduce()
    with pytest.raises(ValueError, match="dtype torch.bfloat16"):
        reduce.sum_([torch.zeros(2, dtype=torch.bfloat16)], "a")
    with pytest.raises(ValueError, match="contiguous"):
        reduce.sum_([torch.zeros(4, 4).t()], "a")
    with pytest.raises(UsageError, match="merge.backend: 'nccl' is not one of auto, horovod, mpi"):
        make_allreduce("nccl", None)


def test_horovod_missing(monkeypatch):
    monkeypatch.setattr(allreduce, "_load_horovod", lambda: (None, "Horovod is not installed"))
    assert allreduce.horovod_status() == "Horovod is not installed"
    with pytest.raises(UsageError, match="Horovod is not installed.*set merge.backend: mpi"):
        HorovodAllreduce(COMM)


@RANKS
def test_auto_falls_back_together_when_one_rank_lacks_horovod(monkeypatch):
    load = allreduce._load_horovod
    monkeypatch.setattr(allreduce, "_load_horovod",
                        lambda: (None, "Horovod is not installed") if COMM.rank == 1 else load())
    reduce = make_allreduce("auto", COMM)
    parallel_assert(isinstance(reduce, MpiAllreduce) and "Horovod is not installed" in reduce.note)


@RANKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_sum(backend, dtype):
    reduce = make(backend)
    counts = [1000, 0, 1, 37]
    tensors = [values(COMM.rank, count, dtype) for count in counts]
    square = values(COMM.rank, 36, dtype).view(6, 6)
    size = torch.tensor([], dtype=dtype).element_size()
    for repeat in range(3):  # the second and third go through Horovod's response cache
        mine = [tensor.clone() for tensor in [*tensors, square]]
        reduce.sum_(mine, "test_sum")
        good = mine[-1].shape == (6, 6)
        for tensor, count in zip(mine, [*counts, 36]):
            want = in_rank_order(count, dtype).view(tensor.shape)
            good &= same_on_all(tensor)
            sizes = sum(values(r, count, dtype).abs() for r in range(COMM.size)).view(tensor.shape)
            good &= bool((tensor - want).abs().le(COMM.size * torch.finfo(dtype).eps * sizes).all())
            good &= backend != "mpi" or torch.equal(tensor, want)
        parallel_assert(good)
    parallel_assert(reduce.bytes_by_name["test_sum"] == 3 * size * (sum(counts) + 36))
    parallel_assert(reduce.calls_by_name["test_sum"] == 3 and reduce.backend == backend)


@RANKS
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_mixed_dtypes_and_nothing_at_all(backend):
    reduce = make(backend)
    tensors = [torch.full((3,), 1.5), torch.full((2,), 2.5, dtype=torch.float64), torch.full((4,), 3),
               torch.full((1,), 0.25), torch.full((2,), 7, dtype=torch.int32)]
    reduce.sum_(tensors, "mixed")
    n = COMM.size
    want = [1.5 * n, 2.5 * n, 3 * n, 0.25 * n, 7 * n]
    parallel_assert(all(bool((t == w).all()) for t, w in zip(tensors, want)))
    reduce.sum_([torch.zeros(0)], "empty")
    reduce.sum_([], "none")
    parallel_assert(reduce.bytes_by_name["empty"] == 0 == reduce.bytes_by_name["none"])


@RANKS
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_large_counts_travel_in_pieces(backend):
    reduce = make(backend)
    reduce.piece_elements = 10  # in place of the limit below 2^31
    tensors = [values(COMM.rank, count, torch.float64) for count in (7, 25, 1, 11)]
    reduce.sum_(tensors, "pieces")
    wanted = [in_rank_order(tensor.numel(), torch.float64) for tensor in tensors]
    parallel_assert(all(torch.allclose(t, w, rtol=1e-12, atol=1e-9) for t, w in zip(tensors, wanted)))
    same = [same_on_all(tensor) for tensor in tensors]
    parallel_assert(all(same))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@RANKS
@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_tensors_on_a_gpu(backend):
    reduce = make(backend)
    tensors = [values(COMM.rank, count, torch.float64).cuda() for count in (7, 0, 100)]
    reduce.sum_(tensors, "gpu")
    wanted = [in_rank_order(t.numel(), torch.float64) for t in tensors]
    parallel_assert(all(torch.allclose(t.cpu(), w, rtol=1e-12, atol=1e-9) for t, w in zip(tensors, wanted)))


@RANKS
def test_part_of_the_ranks():
    part = COMM.Split(color=COMM.rank % 2, key=COMM.rank)
    error = None
    try:
        HorovodAllreduce(part)
    except UsageError as caught:
        error = str(caught)
    parallel_assert(error is not None and "cannot run on a part" in error)
    reduce = make_allreduce("auto", part)
    x = torch.ones(5)
    reduce.sum_([x], "part")
    parallel_assert(bool((x == part.size).all()))
    parallel_assert(part.size == 1 or "only a part of the job" in reduce.note)
    part.Free()


@RANKS
def test_stall_limits_are_set():
    import os

    make("horovod")
    parallel_assert(int(os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) > 0)
    parallel_assert(int(os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]) > 0)
