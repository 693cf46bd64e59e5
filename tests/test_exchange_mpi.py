"""What travels between ranks: rows, byte counts, errors, owners and homes, and reading without changing."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from pytest_mpi import parallel_assert

from hpc_ctr.comm import exchange
from hpc_ctr.comm.exchange import exchange_counts, exchange_rows
from hpc_ctr.comm.session import Session, agree, together
from hpc_ctr.comm.trace import Trace, link_classes, total
from hpc_ctr.embedding.init import init_rows
from hpc_ctr.embedding.table import Table
from hpc_ctr.errors import HpcCtrError, StorageError, UsageError
from hpc_ctr.exchange.lookup import read_values
from hpc_ctr.exchange.replicas import Replicas, keys_of_owner, make_replicas, owners_of
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.tiered import TieredStore

COMM = MPI.COMM_WORLD
RANKS = pytest.mark.parallel([1, 2, 3, 4])


def trace_of(comm=COMM) -> Trace:
    """A trace in which all ranks are on this node."""
    return Trace(link_classes(["here"] * comm.size, comm.rank))


# ---------------------------------------------------------------- rows


CASES = ("uneven", "nothing", "to one", "only own", "holes")


def counts_of(case: str, ranks: int) -> np.ndarray:
    """counts[sender, receiver], the same on every rank."""
    rng = np.random.default_rng(CASES.index(case))
    counts = rng.integers(1, 30, (ranks, ranks))
    if case == "nothing":
        counts[:] = 0
    if case == "to one":
        counts[:, 1:] = 0
    if case == "only own":
        counts *= np.eye(ranks, dtype=np.int64)
    if case == "holes":
        counts *= rng.integers(0, 2, (ranks, ranks))
    return counts


ROWS = {"uint64": ((), np.uint64), "float32": ((3,), np.float32), "float64": ((2, 2), np.float64), "bool": ((), bool),
        "no columns": ((0,), np.float32)}


def rows_of(sender: int, receiver: int, count: int, kind: str) -> np.ndarray:
    """The rows that ``sender`` has for ``receiver``."""
    shape, dtype = ROWS[kind]
    rng = np.random.default_rng([sender, receiver, count])
    return rng.integers(0, 2**63, (count, *shape), np.uint64).astype(dtype)


def exchanged(comm, counts, kind, trace, **more):
    """(what came, what should have) on this rank."""
    sent = [rows_of(comm.rank, to, counts[comm.rank, to], kind) for to in range(comm.size)]
    want = [rows_of(source, comm.rank, counts[source, comm.rank], kind) for source in range(comm.size)]
    got = exchange_rows(comm, np.concatenate(sent), counts[comm.rank], counts[:, comm.rank], trace, "test", **more)
    return got, np.concatenate(want)


@RANKS
@pytest.mark.parametrize("message", [None, 64, 1])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_arrive_in_rank_order(kind, message, monkeypatch):
    """Also in pieces: messages of at most 64 bytes, and of one row each where a row is longer than that."""
    if message:
        monkeypatch.setattr(exchange, "MAX_MESSAGE_BYTES", message)
    right = []
    for case in CASES:
        got, want = exchanged(COMM, counts_of(case, COMM.size), kind, trace_of())
        right.append(got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes())
    parallel_assert(all(right), msg=str(right))


@RANKS
def test_counts():
    counts = counts_of("uneven", COMM.size)
    got = exchange_counts(COMM, counts[COMM.rank].astype(np.int32))
    parallel_assert(got.dtype == np.int64 and np.array_equal(got, counts[:, COMM.rank]))


@pytest.mark.parallel([2, 4])
def test_rows_that_are_not_contiguous():
    wide = np.arange(COMM.size * 8, dtype=np.float32).reshape(COMM.size, 8) + 100 * COMM.rank
    one = np.ones(COMM.size, np.int64)
    got = exchange_rows(COMM, wide[:, ::2], one, one, trace_of(), "test")
    want = np.stack([np.arange(8, dtype=np.float32)[::2] + 8 * COMM.rank + 100 * rank for rank in range(COMM.size)])
    parallel_assert(np.array_equal(got, want))


class Counting:
    """A communicator that adds up the bytes handed to Isend, by receiver."""

    def __init__(self, comm):
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.bytes = np.zeros(comm.size, np.int64)
        self.messages = 0

    def Isend(self, data, peer, tag):
        self.bytes[peer] += data.nbytes
        self.messages += 1
        return self._comm.Isend(data, peer, tag)

    def Irecv(self, data, peer, tag):
        return self._comm.Irecv(data, peer, tag)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("message", [1 << 30, 50])
def test_the_trace_counts_the_bytes_that_were_sent(message, monkeypatch):
    monkeypatch.setattr(exchange, "MAX_MESSAGE_BYTES", message)
    hosts = [f"node{rank // 2}" for rank in range(COMM.size)]
    comm, trace = Counting(COMM), Trace(link_classes(hosts, COMM.rank))
    for case in CASES:
        for kind in ROWS:
            exchanged(comm, counts_of(case, COMM.size), kind, trace)
    near = [rank for rank in range(COMM.size) if hosts[rank] == hosts[COMM.rank]]
    by_link = {"same_node": int(comm.bytes[near].sum()), "other_node": int(np.delete(comm.bytes, near).sum())}
    counted = {link: trace.bytes["test"].get(link, 0) for link in by_link}
    everyone = total(COMM.allgather({name: dict(links) for name, links in trace.bytes.items()}))
    in_all = int(sum(COMM.allgather(int(comm.bytes.sum()))))
    parallel_assert(counted == by_link and comm.bytes[COMM.rank] == 0, msg=f"{counted} {by_link}")
    parallel_assert(sum(everyone["test"].values()) == in_all > 0)
    parallel_assert(set(everyone["test"]) <= {"same_node", "other_node"})


@pytest.mark.parallel(3)
def test_the_trace_knows_ranks_of_a_part_by_their_rank_in_the_world():
    """In the group {0, 2} rank 1 is rank 2 of the world, which is on the other node."""
    trace = Trace(link_classes(["a", "a", "b"], COMM.rank))
    group = COMM.Split(COMM.rank == 1, COMM.rank)
    if COMM.rank != 1:
        got, want = exchanged(group, np.full((2, 2), 5), "uint64", trace, world_ranks=[0, 2])
        right = np.array_equal(got, want) and dict(trace.bytes["test"]) == {"other_node": 40}
    else:
        right = True
    group.Free()
    parallel_assert(right)


def test_payload_of_a_collective_is_counted_once():
    ranks = [{"merge": {"payload": 8}, "pull": {"same_node": 3}}, {"merge": {"payload": 8}, "pull": {"same_node": 4}}]
    assert total(ranks) == {"merge": {"payload": 8}, "pull": {"same_node": 7}}
    alone = trace_of(MPI.COMM_SELF)
    with alone.exchange("all_to_all", "pull") as sent:
        sent(0, 100)
    assert not alone.bytes.get("pull")


# ---------------------------------------------------------------- errors


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", [UsageError, StorageError])
def test_an_error_on_one_rank_is_raised_on_all(kind):
    last = COMM.size - 1
    caught = None
    try:
        with together(COMM):
            if COMM.rank == last:
                raise kind("data.files: nothing matches")
    except HpcCtrError as error:
        caught = error
    parallel_assert(type(caught) is kind and str(caught).startswith("data.files: nothing matches"), msg=repr(caught))
    parallel_assert((f"(rank {last})" in str(caught)) == (COMM.size > 1), msg=str(caught))


@pytest.mark.parallel([2, 3])
def test_of_several_errors_the_first_rank_s_is_raised():
    caught = None
    try:
        with together(COMM):
            raise UsageError(f"mistake of {COMM.rank}") if COMM.rank else StorageError("mistake of 0")
    except HpcCtrError as error:
        caught = error
    parallel_assert(type(caught) is StorageError and "mistake of 0" in str(caught), msg=repr(caught))


@pytest.mark.parallel([2, 3])
def test_an_unforeseen_error_keeps_its_traceback_where_it_happened():
    caught = None
    try:
        agree(COMM, KeyError("x") if COMM.rank == 1 else None)
    except Exception as error:
        caught = error
    told = "rank 1" in str(caught) and "KeyError" in str(caught) and "x" in str(caught)
    right = type(caught) is KeyError if COMM.rank == 1 else type(caught) is HpcCtrError and told
    parallel_assert(right, msg=repr(caught))


@RANKS
def test_without_an_error_nothing_is_raised():
    with together(COMM):
        done = True
    agree(COMM, None)
    parallel_assert(done)


# ---------------------------------------------------------------- owners and homes


EDGES = [0, 1, (1 << 54) - 1, 1 << 54, (1 << 63) - 1, 1 << 63, 2**64 - (1 << 54), 2**64 - 1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 1024])
def test_every_key_has_one_owner_and_lies_in_its_range(ranks):
    ranges = [keys_of_owner(rank, ranks) for rank in range(ranks)]
    assert ranges[0][0] == 0 and ranges[-1][1] == 2**64 - 1
    assert all(a[1] + 1 == b[0] for a, b in pairwise(ranges))
    edges = [key for pair in ranges for key in pair]
    random = np.random.default_rng(ranks).integers(0, 2**64, 5000, np.uint64)
    keys = np.concatenate([np.array(edges + EDGES, np.uint64), random])
    owner = owners_of(keys, ranks)
    first, last = (np.array(side, np.uint64) for side in zip(*ranges))
    assert owner.dtype == np.int64 and ((first[owner] <= keys) & (keys <= last[owner])).all()
    shards = [(int(b) - int(a) + 1) >> 54 for a, b in ranges]
    assert sum(shards) == 1024 and max(shards) - min(shards) <= 1


def test_owners_that_are_written_down():
    keys = np.array(EDGES, np.uint64)
    assert owners_of(keys, 1).tolist() == [0] * 8
    assert owners_of(keys, 3).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert owners_of(keys, 1024).tolist() == [0, 0, 0, 1, 511, 512, 1023, 1023]
    assert keys_of_owner(1, 3) == (342 << 54, (683 << 54) - 1)
    assert len(owners_of(keys[:0], 5)) == 0


def replicas_of(groups: list[list[int]], mine: int = 0) -> Replicas:
    """Replicas of a made-up world."""
    size = sum(map(len, groups))
    local = np.zeros(size, np.int64)
    for group in groups:
        local[group] = np.arange(len(group))
    return Replicas(SimpleNamespace(size=size), groups, mine, None, local)


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0], [1], [2]], [[0, 1], [2, 3]], [[0, 2, 4], [1, 3]],
                                    [[0], [1, 2, 3]]])
def test_homes(groups):
    keys = np.random.default_rng(1).integers(0, 2**64, 2000, np.uint64)
    size = sum(map(len, groups))
    owner = owners_of(keys, size)
    for mine, group in enumerate(groups):
        replicas = replicas_of(groups, mine)
        home = replicas.homes_of(keys)
        assert home.min() >= 0 and home.max() < len(group) and replicas.several == (len(groups) > 1)
        # the rank with the owner's place in its own group, so that ranks of equal index talk to each other
        place = {rank: at for members in groups for at, rank in enumerate(members)}
        assert home.tolist() == [place[rank] % len(group) for rank in owner.tolist()]
        if not replicas.several:
            assert np.array_equal(home, owner)  # one replica relies on it: owners are the homes of their own rows


@RANKS
@pytest.mark.parametrize("kind", ["world", "node", "rank", "auto"])
def test_replicas_on_this_host(kind):
    session = Session(COMM, COMM.rank, COMM.size)
    replicas = make_replicas(session, kind)
    alone = kind == "rank"
    want = [[rank] for rank in range(COMM.size)] if alone else [list(range(COMM.size))]
    right = replicas.groups == want and replicas.members == want[replicas.mine] and COMM.rank in replicas.members
    right &= replicas.comm.size == len(replicas.members) and replicas.members[replicas.comm.rank] == COMM.rank
    replicas.comm.Free()
    parallel_assert(right)


@pytest.mark.parallel([3, 4])
def test_a_replica_a_node():
    """Two nodes, the first with every even rank."""
    session = Session(COMM, COMM.rank, COMM.size)
    session.__dict__["hosts"] = [f"node{rank % 2}" for rank in range(COMM.size)]
    found = {kind: make_replicas(session, kind) for kind in ("auto", "node", "world")}
    want = [list(range(0, COMM.size, 2)), list(range(1, COMM.size, 2))]
    right = all(found[kind].groups == want and found[kind].mine == COMM.rank % 2 for kind in ("auto", "node"))
    right &= found["node"].comm.allgather(COMM.rank) == want[COMM.rank % 2] and not found["world"].several
    for each in found.values():
        each.comm.Free()
    parallel_assert(right)


# ---------------------------------------------------------------- reading without changing


TABLE = Table("t", (0, 1), 3, True, np.dtype(np.float32), "rowwise_adagrad", 0.1, 0.9, 0.999, 1e-8, 0.5)
SEED = 13
DEFAULTS = np.array([0x1111111111111111, 0xEEEEEEEEEEEEEEEE], np.uint64)  # the second is trained, the first is not
KNOWN = np.concatenate([np.random.default_rng(5).integers(0, 2**64, 60, np.uint64), DEFAULTS[1:]])


def record_of(keys: np.ndarray) -> np.ndarray:
    """The stored record of each key."""
    return np.stack([np.random.default_rng(int(key)).normal(size=TABLE.floats) for key in keys]).astype(np.float32)


def filled_store(folder) -> TieredStore:
    """This rank's rows of KNOWN."""
    store = TieredStore(str(folder), RecordLayout(TABLE.width, TABLE.state_width, TABLE.dtype), 4 << 20, "t")
    mine = KNOWN[owners_of(KNOWN, COMM.size) == COMM.rank]
    if len(mine):
        store.put(mine, record_of(mine), np.full(len(mine), 3, np.uint32))
    return store


@RANKS
def test_unknown_keys_read_their_field_s_default_row_and_none_is_made(tmp_path):
    rng = np.random.default_rng(COMM.rank)
    unknown = np.setdiff1d(rng.integers(0, 2**64, 40, np.uint64), KNOWN)
    keys = rng.permutation(np.concatenate([rng.choice(KNOWN, 30, replace=False), unknown]))
    if COMM.rank == 1:
        keys = keys[:0]  # a rank without data takes part
    field = rng.integers(0, 2, len(keys))
    defaults = np.stack([init_rows(DEFAULTS[:1], SEED, TABLE.width, TABLE.dim, TABLE.init_scale)[0],
                         record_of(DEFAULTS[1:])[0, :TABLE.width]])
    is_known = np.isin(keys, KNOWN)
    want = defaults[field]
    if is_known.any():
        want[is_known] = record_of(keys[is_known])[:, :TABLE.width]
    with filled_store(tmp_path / str(COMM.rank)) as store:
        before = store.rows
        trace = trace_of()
        got = [read_values(COMM, TABLE, store, keys, field, DEFAULTS, SEED, trace) for _ in range(2)]
        right = all(x.dtype == np.float32 and x.tobytes() == want.tobytes() for x in got) and store.rows == before
        right &= sum(COMM.allgather(store.rows)) == len(KNOWN)
        kept = [(k, r, t) for k, r, t in store.iterate()]
        right &= all(np.array_equal(r, record_of(k)) and (t == 3).all() for k, r, t in kept)
    parallel_assert(right)
    parallel_assert((sum(trace.bytes["lookup"].values()) > 0) == (COMM.size > 1))
