"""The manifest of a store: which segments are live. It is replaced by rename, so a crash leaves the old or
the new one."""

import hashlib
import json
import os
from dataclasses import dataclass

import numpy as np

from hpc_ctr.errors import StorageError
from hpc_ctr.storage import fs
from hpc_ctr.storage.record import RecordLayout

NAME = "manifest.json"
VERSION = 1
LIFECYCLE_VERSION = 2  # of a store whose rows have a lifecycle


@dataclass(frozen=True)
class Entry:
    """One segment: file name, rows, live rows, digest of the file."""

    file: str
    rows: int
    live: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A committed state. Where a key is in several segments, the later entry holds its row."""

    table: str
    width: int
    state: int
    dtype: str
    next_number: int
    segments: tuple[Entry, ...] = ()
    lifecycle: bool = False

    @property
    def layout(self) -> RecordLayout:
        """The layout of the store's rows."""
        return RecordLayout(self.width, self.state, np.dtype(self.dtype), self.lifecycle)

    def encode(self) -> bytes:
        """Canonical JSON with its own SHA-256, so that any changed byte is found."""
        version = LIFECYCLE_VERSION if self.lifecycle else VERSION
        body = {"format": "hpc_ctr store", "version": version, "table": self.table, "width": self.width,
                "state": self.state, "dtype": self.dtype, "next_number": self.next_number,
                "segments": [vars(entry) for entry in self.segments]}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return (json.dumps({"digest": digest, "store": body}, indent=1, sort_keys=True) + "\n").encode()


def path_of(directory: str) -> str:
    """Where a store keeps its manifest."""
    return os.path.join(directory, NAME)


def load(directory: str) -> Manifest:
    """The committed manifest; StorageError when it is missing, damaged or of another version."""
    path = path_of(directory)
    data = fs.read_file(path)
    try:
        body = json.loads(data)["store"]
        if body["version"] not in (VERSION, LIFECYCLE_VERSION):
            raise StorageError(f"{path} has version {body['version']}, this program reads {VERSION} and "
                               f"{LIFECYCLE_VERSION}: use the version of hpc_ctr that wrote it")
        manifest = Manifest(body["table"], body["width"], body["state"], body["dtype"], body["next_number"],
                            tuple(Entry(**entry) for entry in body["segments"]), body["version"] == LIFECYCLE_VERSION)
        intact = manifest.encode() == data
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise StorageError(f"{path} is damaged (its checksum does not match): start from the last checkpoint")
    return manifest


def prepare(directory: str, manifest: Manifest) -> None:
    """First half of a commit: the new manifest is on the disk, under its temporary name."""
    temporary = path_of(directory) + fs.TEMPORARY
    try:
        fs.write_file(temporary, manifest.encode())
    except StorageError:
        fs.remove_quietly(temporary)
        raise


def publish(directory: str) -> None:
    """Second half: from here on the new manifest is the committed state."""
    fs.rename(path_of(directory) + fs.TEMPORARY, path_of(directory))
    fs.sync_directory(directory)


def new(table: str, layout: RecordLayout, next_number: int = 1, segments: tuple[Entry, ...] = ()) -> Manifest:
    """The manifest of a store, empty unless segments are given."""
    return Manifest(table, layout.width, layout.state, layout.dtype.name, next_number, segments, layout.lifecycle)
