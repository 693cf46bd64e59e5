"""One training step, and the forward pass that training and evaluation share. Device-neutral."""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from hpc_ctr.data.batch import Batch
from hpc_ctr.embedding.device_table import pool
from hpc_ctr.embedding.table import Table
from hpc_ctr.embedding.working_set import Bags
from hpc_ctr.errors import UsageError
from hpc_ctr.exchange.pass_rows import PassRows


def forward(model: torch.nn.Module, tables: list[Table], batch: Batch, values: list[torch.Tensor], bags: list[Bags],
            device: torch.device, dtype: torch.dtype, autocast: bool) -> torch.Tensor:
    """Logits [B] of ``dtype``, from the values [u, width] of each table's distinct rows and the bags into them."""
    vectors, firsts = [], []
    for table, value, bag in zip(tables, values, bags):
        pooled, first = pool(value, bag.index, bag.offsets, len(table.fields), batch.size, table.dim)
        vectors.append(pooled.to(dtype))
        firsts.append(first.to(dtype))
    first = None
    if tables[0].first_order:
        first = firsts[0] if len(tables) == 1 else _in_schema_order(firsts, tables)
    dense = torch.from_numpy(batch.dense).to(device, dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        out = model(dense, tuple(vectors), first)
    _check_logits(out, model, batch.size)
    return out.to(dtype)


def _check_logits(out: Any, model: torch.nn.Module, size: int) -> None:
    """Raises UsageError for what a user's module gives in place of logits; torch's own words lead nowhere."""
    wrong = ""
    if not isinstance(out, torch.Tensor):
        wrong = f"a {type(out).__name__}"
    elif not out.is_floating_point():
        wrong = f"numbers of type {out.dtype}"
    elif out.shape != (size,):
        wrong = f"a tensor of shape {list(out.shape)}"
    elif torch.is_grad_enabled() and not out.requires_grad:
        wrong = "a tensor that no gradient flows through"
    if wrong:
        raise UsageError(f"model.name: {type(model).__name__}.forward gives {wrong} for {size} samples; it must give one "
                         "logit a sample: floats of shape [B], computed from the parameters")


def train_step(model: torch.nn.Module, optimizer: Any, pass_rows: list[PassRows], batch: Batch, samples: np.ndarray,
               step: int, device: torch.device, dtype: torch.dtype, autocast: bool) -> tuple[np.ndarray, float]:
    """Values in, forward, backward, gradients back, optimizer. Collective.

    step counts from the start of the pass; samples int64 [N] are all ranks' samples in it. Returns this rank's logits
    [B], made before anything was learned from the batch, and its mean loss (NaN without samples).
    """
    tables = [rows.table for rows in pass_rows]
    values = [rows.values(step).requires_grad_() for rows in pass_rows]
    optimizer.zero_grad()
    logits, loss_value = np.zeros(0, np.float32), float("nan")
    if batch.size:
        bags = [rows.working_set.bags[step] for rows in pass_rows]
        out = forward(model, tables, batch, values, bags, device, dtype, autocast)
        loss = binary_cross_entropy_with_logits(out, torch.from_numpy(batch.label).to(device, dtype))
        loss.backward()
        logits, loss_value = out.detach().cpu().numpy(), float(loss.detach())
    for rows, value in zip(pass_rows, values):
        grad = value.grad if value.grad is not None else torch.zeros_like(value)
        # the replica's samples are one big batch: its mean loss weighs this rank's mean by its share of them
        share = batch.size / max(1, int(samples[rows.replicas.members].sum()))
        rows.apply(step, grad if share == 1 else grad * share)
    optimizer.step(samples)
    return logits, loss_value


def _in_schema_order(firsts: list[torch.Tensor], tables: list[Table]) -> torch.Tensor:
    order = np.argsort(np.concatenate([np.array(table.fields) for table in tables]), kind="stable")
    return torch.cat(firsts, 1)[:, torch.from_numpy(order).to(firsts[0].device)]
