"""The device table: a rank's share of a pass's rows, as one tensor on the device, and the row optimizers on it."""

import numpy as np
import torch

from hpc_ctr.embedding.table import Table
from hpc_ctr.kernels import records as kernel


class DeviceTable:
    """Rows of one table in the working set of one home rank.

    records: tensor [rows, floats] of the table's dtype on ``device``; t: step counts, int32 [rows], beside it. In host
    memory the numba kernels work on the same storage; elsewhere torch operations do the same arithmetic.
    """

    def __init__(self, table: Table, records: np.ndarray, t: np.ndarray, device: torch.device):
        """Take over ``records`` [rows, floats] and ``t`` uint32 [rows] (not copied where the device is the host)."""
        self.table = table
        self.device = device
        self.records = torch.from_numpy(records).to(device)
        self.t = torch.from_numpy(t.view(np.int32)).to(device)
        self.on_host = device.type == "cpu"
        if self.on_host:
            self._records = records
            self._t = t
            self._scratch = np.full(len(records), -1, np.int32)
        real = table.dtype.type
        # beyond this many steps 1-beta^t rounds to 1 in the table's dtype
        length = 2 + max(int(np.log(np.finfo(real).eps / 4) / np.log(beta)) if beta > 0 else 1
                         for beta in (table.beta1, table.beta2))
        self._scale1 = kernel.bias_scales(table.beta1, length).astype(real)
        self._scale2 = kernel.bias_scales(table.beta2, length).astype(real)

    def values(self, slots: np.ndarray) -> torch.Tensor:
        """x of the rows ``slots`` int32 [n]: [n, width] on the device."""
        if self.on_host:
            out = np.empty((len(slots), self.table.width), self.table.dtype)
            kernel.gather_x(self._records, slots, out)
            return torch.from_numpy(out)
        return self.records[self._on_device(slots), :self.table.width]

    def step(self, slots: np.ndarray, grads: torch.Tensor) -> None:
        """One step of the row optimizer on every row that occurs in ``slots`` int32 [n].

        grads [n, width]; the gradients of a slot that occurs several times are summed first, in the order given.
        """
        if len(slots) == 0:
            return
        if self.on_host:
            self._step_on_host(slots, grads.numpy())
        else:
            self._step_on_device(slots, grads)

    def read(self, slots: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Whole records [n, floats] and t uint32 [n] of ``slots``, in host memory."""
        if self.on_host:
            return self._records[slots], self._t[slots]
        at = slots if isinstance(slots, slice) else self._on_device(slots)
        return self.records[at].cpu().numpy(), self.t[at].cpu().numpy().view(np.uint32)

    def steps(self, slots: np.ndarray) -> np.ndarray:
        """t uint32 [n] of ``slots``, in host memory, in a new array."""
        if self.on_host:
            return self._t[slots]
        return self.t[self._on_device(slots)].cpu().numpy().view(np.uint32)

    def write_values(self, slots: np.ndarray, x: np.ndarray) -> None:
        """Replace x [n, width] alone."""
        if self.on_host:
            self._records[slots, :self.table.width] = x
        else:
            self.records[self._on_device(slots), :self.table.width] = torch.from_numpy(x).to(self.device)

    def write(self, slots: np.ndarray, records: np.ndarray, t: np.ndarray) -> None:
        """Replace whole records and step counts."""
        if self.on_host:
            self._records[slots] = records
            self._t[slots] = t
        else:
            at = self._on_device(slots)
            self.records[at] = torch.from_numpy(np.ascontiguousarray(records)).to(self.device)
            self.t[at] = torch.from_numpy(np.ascontiguousarray(t).view(np.int32)).to(self.device)

    def _on_device(self, slots: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(slots, np.int64)).to(self.device)

    def _step_on_host(self, slots: np.ndarray, grads: np.ndarray) -> None:
        table = self.table
        distinct = np.empty(len(slots), np.int32)
        summed = np.empty((len(slots), table.width), table.dtype)
        n = kernel.combine_gradients(slots, grads, self._scratch, distinct, summed)
        distinct, summed = distinct[:n], summed[:n]
        real = table.dtype.type
        if table.optimizer == "adam":
            kernel.step_adam(self._records, self._t, distinct, summed, real(table.lr), real(table.beta1),
                             real(1 - table.beta1), real(table.beta2), real(1 - table.beta2), real(table.eps),
                             self._scale1, self._scale2)
        else:
            kernel.step_rowwise_adagrad(self._records, self._t, distinct, summed, real(table.lr), real(table.eps))

    def _step_on_device(self, slots: np.ndarray, grads: torch.Tensor) -> None:
        table, width = self.table, self.table.width
        distinct, inverse = torch.unique(self._on_device(slots), return_inverse=True)
        summed = torch.zeros((len(distinct), width), dtype=grads.dtype, device=self.device)
        summed.index_add_(0, inverse, grads)
        record = self.records[distinct]
        t = self.t[distinct] + 1
        if table.optimizer == "adam":
            at = t.clamp(max=len(self._scale1) - 1).long()
            c1 = torch.from_numpy(self._scale1).to(self.device)[at].unsqueeze(1)
            c2 = torch.from_numpy(self._scale2).to(self.device)[at].unsqueeze(1)
            m, v = record[:, width:2 * width], record[:, 2 * width:3 * width]
            m.mul_(table.beta1).add_(summed, alpha=1 - table.beta1)
            v.mul_(table.beta2).addcmul_(summed, summed, value=1 - table.beta2)
            record[:, :width] -= table.lr * (m * c1) / ((v * c2).sqrt() + table.eps)
        else:
            record[:, width] += summed.square().mean(1)
            record[:, :width] -= table.lr / (record[:, width:width + 1].sqrt() + table.eps) * summed
        self.records[distinct] = record
        self.t[distinct] = t


class PooledGather(torch.autograd.Function):
    """Sum-pooled bags of a batch from the values of its distinct rows, in host memory.

    apply(values [u, width], index int32 [nnz], offsets int64 [F*B+1], F, B, dim) -> vectors [B, F, dim] and first-order
    weights [B, F] ([0, 0] when width == dim). An empty bag is zero. Sums run in the order of the keys, so the same
    batch gives the same bits always.
    """

    @staticmethod
    def forward(ctx, values, index, offsets, fields, batch, dim):
        vectors = values.new_empty((batch, fields, dim))
        first = values.new_empty((batch, fields) if values.shape[1] > dim else (0, 0))
        kernel.pool_bags(values.detach().numpy(), index, offsets, fields, batch, dim, vectors.numpy(), first.numpy())
        ctx.bags = (index, offsets, fields, batch, dim, values.shape)
        return vectors, first

    @staticmethod
    def backward(ctx, vectors_grad, first_grad):
        index, offsets, fields, batch, dim, shape = ctx.bags
        out = vectors_grad.new_empty(shape)
        kernel.spread_gradients(index, offsets, fields, batch, dim, vectors_grad.contiguous().numpy(),
                                first_grad.contiguous().numpy(), out.numpy())
        return out, None, None, None, None, None


def pool(values: torch.Tensor, index: np.ndarray, offsets: np.ndarray, fields: int, batch: int,
         dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PooledGather on any device: vectors [B, F, dim] and first [B, F] (or [0, 0])."""
    if values.device.type == "cpu":
        return PooledGather.apply(values, index, offsets, fields, batch, dim)
    lengths = torch.from_numpy(np.diff(offsets)).to(values.device)
    bags = torch.repeat_interleave(torch.arange(fields * batch, device=values.device), lengths)
    rows = values[torch.from_numpy(index.astype(np.int64)).to(values.device)]
    pooled = values.new_zeros((fields * batch, values.shape[1])).index_add(0, bags, rows)
    pooled = pooled.view(fields, batch, values.shape[1]).transpose(0, 1)
    return pooled[..., :dim], pooled[..., dim] if values.shape[1] > dim else values.new_empty((0, 0))
