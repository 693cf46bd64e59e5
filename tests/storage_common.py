"""What the tests of failing disks, crashes and damage share: rows whose contents follow from their key, and looking
at what a store, its directory or a checkpoint holds."""

import contextlib
import os
from pathlib import Path

import numpy as np

from hpc_ctr.checkpoint import state
from hpc_ctr.checkpoint.load import segment_files
from hpc_ctr.errors import UsageError
from hpc_ctr.storage import manifest, recovery
from hpc_ctr.storage.cold import ColdStore, ColdStoreOptions
from hpc_ctr.storage.record import RecordLayout
from hpc_ctr.storage.scan import read_whole
from hpc_ctr.storage.segment import SegmentFile, live_rows
from hpc_ctr.storage.tiered import budget_for

LAYOUT = RecordLayout(2, 4)
BUDGET = budget_for(LAYOUT, 100, 2000)
OPTIONS = ColdStoreOptions(output_rows=40)


def rows_of(keys, version):
    """(keys, records, t) whose contents follow from key and version."""
    keys = np.asarray(keys, np.uint64)
    records = (keys[:, None] * np.float32(8) + np.arange(LAYOUT.floats) + np.float32(version) / 16).astype(np.float32)
    return keys, records, np.full(len(keys), version, np.uint32)


def as_dict(keys, records, t):
    """key -> (bytes of the record, t)."""
    return {int(k): (r.tobytes(), int(s)) for k, r, s in zip(keys, records, t, strict=True)}


def together(batches):
    """All rows of an iterator of batches."""
    rows = {}
    for batch in batches:
        rows.update(as_dict(*batch))
    return rows


def everything(store):
    """All rows of a store, cold or tiered."""
    return together(store.iterate(50))


def contents(directory, clean=True):
    """What a new process would find in a directory; ``clean``: opening has removed all leftovers."""
    with ColdStore(str(directory), LAYOUT) as store:
        rows = everything(store)
        assert store.rows == len(rows) and store.verify() == []
        if clean:
            live = {os.path.basename(s.path) for s in store.segments()}
            assert set(os.listdir(directory)) == live | {manifest.NAME, recovery.LOCK}
        return rows


def between(rows, old, new):
    """Whether every row is the old or the new one, and no old one is missing."""
    return set(old) <= set(rows) and all(row in (old.get(k), new[k]) for k, row in rows.items())


class OneRank:
    """As much of a communicator of one rank as a checkpoint needs, without MPI."""

    rank, size = 0, 1

    def allgather(self, value):
        """See MPI."""
        return [value]

    gather = allgather

    def bcast(self, value):
        """See MPI."""
        return value


def manifest_of(step):
    """A checkpoint's manifest for one rank with one table of LAYOUT."""
    return state.Manifest(step, 1, step, 0, 0, {}, 1, [{"name": "default"}], {}, False, 0, {}, {})


def checkpoint_rows(folder):
    """Rows of a checkpoint; each of its segments is whole."""
    [[paths]] = segment_files(folder.parent, state.read_manifest(folder))
    with contextlib.ExitStack() as stack:
        digests = read_whole([stack.enter_context(SegmentFile(path, LAYOUT)) for path in paths])
    assert [f"{digest}.h5" for digest in digests] == [Path(path).name for path in paths]
    return together(live_rows(paths, layout=LAYOUT))


def checkpoint_contents(root):
    """Step, arrays and rows of the checkpoint that ``find`` gives below ``root``, or None; all complete ones are
    whole."""
    whole = {folder: (state.read_manifest(folder).step, state.read_arrays(folder, 0)["dense.x"].tolist(),
                      checkpoint_rows(folder)) for folder in state.complete(Path(root))}
    try:
        return whole[state.find(root)]
    except UsageError:
        return None
