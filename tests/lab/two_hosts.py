"""Run a command by mpirun on two hosts with a slow link between them, all on this machine: hpc_ctr/bench/two_hosts.py.

    python tests/lab/two_hosts.py --mbit 100 --delay-us 500 -n 2 -- hpc-ctr train job.yaml

Linux, as root. Prints at the end how much went over the link.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_ctr.bench.common import MPI_ENVIRONMENT
from hpc_ctr.bench.two_hosts import TwoHosts
from hpc_ctr.errors import HpcCtrError


def main() -> int:
    """The exit code is that of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1000, help="Mbit/s each way")
    parser.add_argument("--delay-us", type=float, default=0, help="microseconds one way")
    parser.add_argument("-n", type=int, default=2, dest="ranks", help="ranks, in blocks over both hosts")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    try:
        with TwoHosts(args.mbit, args.delay_us) as hosts:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(hosts.mpirun_command(args.command, args.ranks),
                                  env={**MPI_ENVIRONMENT, **os.environ, "PATH": path})
            sent, packets = hosts.sent()
            print(f"link: {sent:,} bytes in {packets:,} packets, {sent - hosts.header_bytes * packets:,} of payload")
            return done.returncode
    except HpcCtrError as error:
        print(f"two_hosts: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
