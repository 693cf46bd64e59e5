"""The lab of two hosts: host names, rate, delay, counters, and that nothing stays; training over it beside one host."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accept_cli import TESTS, base_job, cli_env, hpc_ctr, losses_by_step, ok, summary, write_criteo, write_job
from test_trace import near

from hpc_ctr.bench import two_hosts
from hpc_ctr.bench.two_hosts import TwoHosts
from hpc_ctr.errors import UsageError

needs_lab = pytest.mark.skipif(bool(two_hosts.missing()), reason=f"no two hosts here: {two_hosts.missing()}")

PING_PONG = """
import socket, sys, time
import numpy as np
from mpi4py import MPI
comm, size = MPI.COMM_WORLD, int(sys.argv[1])
data, seconds = np.zeros(size, np.uint8), []
for _ in range(4):
    comm.Barrier()
    begin = time.perf_counter()
    comm.Send(data, 1) if comm.rank == 0 else comm.Recv(data, 0)
    comm.Recv(data, 1) if comm.rank == 0 else comm.Send(data, 0)
    seconds.append((time.perf_counter() - begin) / 2)
hosts = comm.gather(socket.gethostname())
if comm.rank == 0:
    print(min(seconds), *hosts)
"""


def ping_pong(hosts: TwoHosts, size: int) -> tuple[float, list[str]]:
    """Seconds one way, and the ranks' host names."""
    done = hosts.mpirun([sys.executable, "-c", PING_PONG, str(size)], env=cli_env(), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    seconds, *names = done.stdout.split()
    return float(seconds), names


@needs_lab
def test_the_link_has_its_rate_and_its_counters():
    with TwoHosts(mbit=100) as hosts:
        seconds, names = ping_pong(hosts, 2_000_000)
        sent, packets = hosts.sent()
    assert names == ["node0", "node1"]
    assert seconds > 0.9 * 2_000_000 * 8 / 100e6
    payload = sent - hosts.header_bytes * packets
    assert 0.99 < payload / (8 * 2_000_000) < 1.05, f"{sent} bytes, {packets} packets"


@needs_lab
def test_the_link_has_its_delay():
    with TwoHosts(mbit=1000, delay_us=20_000) as hosts:
        seconds, _ = ping_pong(hosts, 8)
    assert seconds > 0.018


@needs_lab
def test_nothing_stays():
    """Not even what was started on a host and goes on."""
    def spaces() -> list[str]:
        told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return [line.split()[0] for line in told.splitlines() if line.startswith(f"hpcctr{os.getpid()}")]

    with TwoHosts(delay_us=100) as hosts:
        left = subprocess.Popen(hosts.command(1, ["sleep", "600"]))
        time.sleep(0.5)
        folder = hosts._folder
        assert len(spaces()) == 2 and folder.is_dir()
    assert left.wait(timeout=10) != 0
    assert not spaces() and not folder.exists()


@pytest.mark.parametrize("settings", [{"mbit": 0}, {"mbit": -1}, {"delay_us": -1}])
def test_settings_that_are_none(settings, monkeypatch):
    monkeypatch.setattr(two_hosts, "missing", lambda: "")
    with pytest.raises(UsageError, match="rate must be above 0"):
        TwoHosts(**settings)


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="two hosts cannot be set up: network namespaces need root"):
        TwoHosts()


def test_without_a_command_it_names_the_package(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(two_hosts, "_COMMANDS", ("no-such-command",))
    assert "no-such-command is not there (Debian: " in two_hosts.missing()


@needs_lab
@pytest.mark.parametrize("dense", ["kstep", "sync"])
def test_training_on_two_hosts_is_that_on_one(dense, tmp_path):
    """Losses are the same bits; the network carried what the trace says, within 5 %."""
    clicks = tmp_path / "clicks.tsv"
    write_criteo(clicks, 6000, 3000, seed=5)
    job = write_job(tmp_path / "job.yaml", base_job(tmp_path, clicks, merge={"dense": dense, "backend": "mpi"},
                                                    rows={"replica": "world"}, embedding={"dim": 32}))
    with TwoHosts(mbit=1000) as hosts:
        done = hosts.mpirun([sys.executable, "-m", "hpc_ctr.cli.main", "train", str(job), "--run_dir",
                             str(tmp_path / "two")], env=cli_env(), timeout=240)
        ok(done)
        sent, packets = hosts.sent()
    ok(hpc_ctr("train", job, "--run_dir", tmp_path / "one", ranks=2))
    assert losses_by_step(tmp_path / "two") == losses_by_step(tmp_path / "one") != {}
    two, one = (summary(tmp_path / name)["bytes"] for name in ("two", "one"))
    for purpose in one:
        assert sum(near(two[purpose]).values()) == sum(near(one[purpose]).values())
        assert not near(two[purpose])["same_node"] and not near(one[purpose])["other_node"]
    traced = sum(near(links)["other_node"] for links in two.values())
    payload = sent - hosts.header_bytes * packets
    assert 1 <= payload / traced < 1.05, f"{payload} on the link, {traced} in the trace"


@needs_lab
def test_the_script_of_the_lab():
    script = str(TESTS / "lab" / "two_hosts.py")
    done = subprocess.run([sys.executable, script, "--mbit", "500", "-n", "3", "--", "hostname"], env=cli_env(),
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[:3]) == ["node0", "node0", "node1"]
    assert "packets" in done.stdout.splitlines()[3]
