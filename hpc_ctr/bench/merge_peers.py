"""What ``bench merge`` compares with, one rank of it: plain PyTorch on the same batches and towers.

``python -m hpc_ctr.bench.merge_peers SETTINGS`` (JSON) under mpirun. Batches are read, and keys mapped to rows of the
table, before the clock starts.

ddp: ``DistributedDataParallel`` over gloo, one ``EmbeddingBag`` with sparse gradients, SparseAdam and Adam.
semisync: rows as with ddp and in every step; the towers by TorchRec's ``SemisyncOptimizer``, averaged every 20 steps.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from hpc_ctr import config as job_file
from hpc_ctr import models
from hpc_ctr.comm.session import run_and_exit, start
from hpc_ctr.data.source import open_source
from hpc_ctr.report.run_folder import write_json

LOCAL_STEPS = 20


@dataclass(frozen=True)
class Step:
    """A batch for EmbeddingBag: rows int64 [nnz], offsets int64 [F*B + 1], dense [B, D], label [B]."""

    rows: torch.Tensor
    offsets: torch.Tensor
    dense: torch.Tensor
    label: torch.Tensor


class Rows(nn.Module):
    """One table of ``rows`` rows of ``width`` floats."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, width, mode="sum", sparse=True, include_last_offset=True)
        nn.init.normal_(self.table.weight, 0, 0.01)

    def forward(self, step: Step) -> torch.Tensor:
        """Vectors [B, F, width]."""
        out = self.table(step.rows, step.offsets)
        return out.view(-1, len(step.label), out.shape[1]).transpose(0, 1)


class Clicks(nn.Module):
    """Rows and tower."""

    def __init__(self, rows: Rows, tower: nn.Module) -> None:
        super().__init__()
        self.rows, self.tower = rows, tower

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [B]."""
        return self.tower(step.dense, (self.rows(step),))


def main(argv: list[str]) -> int:
    """Run one rank. Collective."""
    settings = json.loads(argv[0])
    session = start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _own_device(os.environ["HPC_CTR_BENCH_DEVICES"].split(","))
    dist.init_process_group("gloo", init_method=settings["address"], rank=session.rank, world_size=session.size)
    steps, num_dense, fields = _steps(settings, session)
    torch.manual_seed(1)
    tower = models.build(settings["model"],
                         models.ModelSpec(num_dense, [models.TableSpec("table", fields, settings["width"])]), {})
    rows = Rows(settings["ids"], settings["width"])
    train = {"ddp": _ddp, "semisync": _semisync}[settings["system"]](rows, tower)
    begin = time.perf_counter()
    for number, step in enumerate(steps):
        if number == len(steps) - settings["steps"]:
            dist.barrier()
            begin = time.perf_counter()
        train(step)
    dist.barrier()
    seconds = time.perf_counter() - begin
    if session.is_root:
        write_json(settings["out"], {"samples_per_s": settings["steps"] * settings["batch"] * session.size / seconds})
    dist.destroy_process_group()
    return 0


def _own_device(names: list[str]) -> str:
    return next(name for _, name in socket.if_nameindex() if name in names)


def _steps(settings: dict[str, Any], session: Any) -> tuple[list[Step], int, list[str]]:
    """This rank's full batches, as many as every rank has."""
    config = job_file.from_dict({"data": {"files": [settings["data"]], "batch_size": settings["batch"],
                                          "shuffle_blocks": 1}})
    source = open_source(config.data, config.seed, session.comm)
    steps = []
    with source.stream() as stream:
        for batch in stream:
            if batch.size == settings["batch"]:
                rows = (batch.keys % np.uint64(settings["ids"])).astype(np.int64)
                steps.append(Step(*map(torch.from_numpy, (rows, batch.offsets, batch.dense, batch.label))))
    count = min(session.comm.allgather(len(steps)))
    return steps[:count], source.num_dense, [field.name for field in source.fields]


def _ddp(rows: Rows, tower: nn.Module) -> Callable[[Step], None]:
    model = nn.parallel.DistributedDataParallel(Clicks(rows, tower), broadcast_buffers=False)
    sparse, dense = torch.optim.SparseAdam(rows.parameters()), torch.optim.Adam(tower.parameters())

    def train(step: Step) -> None:
        sparse.zero_grad()
        dense.zero_grad()
        binary_cross_entropy_with_logits(model(step), step.label).backward()
        sparse.step()
        dense.step()

    return train


def _semisync(rows: Rows, tower: nn.Module) -> Callable[[Step], None]:
    raise ModuleNotFoundError("No module named 'torchrec'")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
