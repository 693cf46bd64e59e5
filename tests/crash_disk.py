"""A disk in memory that knows what was synced, and the states in which a loss of power may leave it.

It is fed by ``recorder`` of hpc_ctr/storage/fs.py. It promises as little as POSIX does: contents of a file are on the
disk after a sync of the file, names after a sync of their directory. Whatever was not synced is there or not, in any
order, and a write by sectors of 512 bytes. Only a rename takes place as a whole or not at all.
"""

import copy
import os
import shutil

SECTOR = 512


class File:
    """Contents now and at the last sync, and the changes in between."""

    def __init__(self, data=b""):
        self.now, self.synced, self.changes = bytearray(data), bytes(data), []

    def change(self, change):
        """Write (offset, bytes), or set the length (None, length)."""
        apply(self.now, *change)
        self.changes.append(change)

    def sync(self):
        """All changes are on the disk."""
        self.synced, self.changes = bytes(self.now), []


class Directory:
    """Names now and at the last sync, and the changes in between."""

    def __init__(self):
        self.now, self.synced, self.changes = {}, {}, []

    def change(self, new, old=None, node=None):
        """Give ``new`` to a node and take ``old`` away; without a node ``new`` goes."""
        rename(self.now, new, old, node)
        self.changes.append((new, old, node))

    def sync(self):
        """All changes are on the disk."""
        self.synced, self.changes = dict(self.now), []


def apply(data, offset, what):
    """One change of a file's contents."""
    if offset is None:
        del data[what:]
        data.extend(bytes(what - len(data)))
    else:
        data.extend(bytes(max(0, offset - len(data))))
        data[offset:offset + len(what)] = what


def rename(names, new, old, node):
    """One change of a directory's names."""
    if old is not None:
        names.pop(old, None)
    if node is None:
        names.pop(new, None)
    else:
        names[new] = node


class Disk:
    """The tree below ``root``, a directory that was empty when recording began."""

    def __init__(self, root):
        self.root, self.top = str(root), Directory()

    def _parts(self, path):
        relative = os.path.relpath(path, self.root)
        assert not relative.startswith(".."), f"{path} lies outside of {self.root}"
        return [part for part in relative.split(os.sep) if part != "."]

    def _directory(self, path):
        node = self.top
        for part in self._parts(path):
            node = node.now[part]
        return node

    def _place(self, path):
        """Directory and name of a path."""
        return self._directory(os.path.dirname(path)), os.path.basename(path)

    def play(self, operation, path, detail):
        """Do what was recorded. The root's own making and its parent's sync are taken for granted."""
        path = os.path.abspath(path)
        if (path == self.root and operation == "make directory") or len(path) < len(self.root):
            return
        if operation == "sync directory":
            self._directory(path).sync()
            return
        directory, name = self._place(path)
        if operation == "create":
            if name in directory.now:
                directory.now[name].change((None, 0))
            else:
                directory.change(name, node=File())
        elif operation == "write":
            directory.now[name].change(detail)
        elif operation == "resize":
            directory.now[name].change((None, detail))
        elif operation == "sync":
            directory.now[name].sync()
        elif operation in ("rename", "link"):
            source, old = self._place(os.path.abspath(detail))
            node = source.now[old]
            assert operation == "link" or source is directory, "a rename between directories is two changes"
            directory.change(name, old if operation == "rename" else None, node)
        elif operation in ("remove", "remove directory"):
            assert operation == "remove" or not directory.now[name].now
            directory.change(name)
        elif operation == "make directory":
            directory.change(name, node=Directory())
        else:
            raise AssertionError(f"unknown operation {operation}")

    def copy(self):
        """Another disk in the same state."""
        return copy.deepcopy(self)

    def after(self, keep_name, keep_change):
        """The tree after a loss of power: path -> bytes, None for a directory. ``keep_name(change)``: whether an
        unsynced change of names took place; ``keep_change(file)``: contents of a file with unsynced changes."""
        tree, seen = {}, {}

        def walk(directory, prefix):
            names = dict(directory.synced)
            for change in directory.changes:
                if keep_name(change):
                    rename(names, *change)
            for name, node in names.items():
                path = f"{prefix}{name}"
                if isinstance(node, Directory):
                    tree[path] = None
                    walk(node, path + "/")
                else:
                    if id(node) not in seen:     # a file with two names has the same contents under both
                        seen[id(node)] = keep_change(node) if node.changes else node.synced
                    tree[path] = seen[id(node)]

        walk(self.top, "")
        return tree

    def present(self):
        """The tree as processes see it."""
        return self.after(lambda change: True, lambda file: bytes(file.now))

    def extremes(self):
        """Nothing unsynced is kept; all of it; names alone; contents alone."""
        for names in (False, True):
            for data in (False, True):
                yield self.after(lambda change: names, lambda file: bytes(file.now) if data else file.synced)

    def random_state(self, rng):
        """Any of the unsynced changes, each write whole, torn or not at all."""
        share = rng.random()
        return self.after(lambda change: rng.random() < share, lambda file: torn(file, rng, rng.random()))

    def states(self, rng, count):
        """The extremes and ``count`` random states, without repetition where nothing was left to chance."""
        yield from self.extremes()
        for _ in range(count):
            yield self.random_state(rng)


def torn(file, rng, share):
    """Contents of a file of which a random part of the unsynced changes reached the disk."""
    data = bytearray(file.synced)
    for offset, what in file.changes:
        fate = rng.random()
        if fate < share / 2:
            apply(data, offset, what)
        elif fate < share:
            tear(data, offset, what, rng)
    return bytes(data)


def tear(data, offset, what, rng):
    """Do a part of a write: some of its sectors, or its first half; the length may be that after the whole write."""
    if offset is None:
        return
    if rng.random() < 0.5 and len(data) < offset + len(what):
        apply(data, None, offset + len(what))
    if rng.random() < 0.3:
        apply(data, offset, what[:len(what) // 2])
        return
    begin = offset
    while begin < offset + len(what):
        end = min((begin // SECTOR + 1) * SECTOR, offset + len(what))
        if rng.random() < 0.5:
            apply(data, begin, what[begin - offset:end - offset])
        begin = end


def put_down(tree, root):
    """Make ``root`` a directory with exactly this tree."""
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    for path, data in tree.items():
        place = os.path.join(root, path)
        if data is None:
            os.mkdir(place)
        else:
            with open(place, "wb") as file:
                file.write(data)


def read_up(root):
    """The tree that is really there."""
    tree = {}
    for folder, folders, files in os.walk(root):
        for name in folders:
            tree[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                tree[os.path.relpath(path, root)] = file.read()
    return tree
