"""The disk under a path: where it is mounted, what it is, how much is free."""

import os
from dataclasses import dataclass
from pathlib import Path

# Rows on SSD are read at random and locked by one rank; on these a read costs a network round trip.
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs",
           "9p", "afs", "orangefs", "panfs", "wekafs"}
MEMORY = {"tmpfs", "ramfs"}


@dataclass(frozen=True)
class Disk:
    """What is under ``path``; sizes in bytes. ``writable`` is about the deepest folder of the path that exists."""

    path: str
    mount: str
    filesystem: str
    device: str
    total: int
    free: int
    writable: bool

    @property
    def is_network(self) -> bool:
        """True for file systems of other machines."""
        return self.filesystem in NETWORK

    @property
    def is_memory(self) -> bool:
        """True when files there take memory."""
        return self.filesystem in MEMORY


def existing_parent(path: str | os.PathLike[str]) -> Path:
    """``path`` itself, or the deepest folder above it that exists."""
    here = Path(path).absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    return here


def parse_mounts(text: str) -> list[tuple[str, str, str]]:
    """(mount point, file system, device) of every line of a /proc/self/mountinfo."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        words, kind = left.split(), right.split()
        if separator and len(words) >= 5 and len(kind) >= 2:
            mounts.append((_plain(words[4]), kind[0], _plain(kind[1])))
    return mounts


def mount_of(path: str | os.PathLike[str], mounts: list[tuple[str, str, str]]) -> tuple[str, str, str]:
    """The mount that holds ``path``: the longest mount point above it, the last one where several are the same."""
    real = os.path.realpath(path)
    best = ("/", "unknown", "unknown")
    for mount in mounts:
        point = mount[0].rstrip("/")
        if (real == point or real.startswith(point + "/")) and len(point) >= len(best[0].rstrip("/")):
            best = mount
    return best


def disk_of(path: str | os.PathLike[str]) -> Disk:
    """The disk that files under ``path`` would be written to; the path need not exist yet. Writes nothing."""
    here = existing_parent(path)
    try:
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        mounts = []
    mount, filesystem, device = mount_of(here, mounts)
    room = os.statvfs(here)
    return Disk(str(path), mount, filesystem, device, room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize,
                here.is_dir() and os.access(here, os.W_OK | os.X_OK))


def _plain(text: str) -> str:
    """A name of mountinfo with its octal escapes (\\040 for a blank) resolved."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
