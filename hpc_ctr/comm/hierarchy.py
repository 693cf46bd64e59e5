"""Sums over ranks that cross the network once a node: inside nodes, between nodes rank by rank, and back.

The array is cut into as many shares as the smallest node has ranks. Inside a node the rank with index i sums share i
(reduce-scatter); the ranks with index i of all n nodes sum that share between them (a "rail"); then each gives its
share to the others of its node (all-gather). Between nodes 2(n-1)S bytes travel for an array of S bytes, where a ring
over all ranks sends more the more often it crosses from node to node.
"""

from typing import Any

import numpy as np

from hpc_ctr.comm.allreduce import BlockwiseAllreduce, even_bounds
from hpc_ctr.comm.exchange import spread_blocks, sum_blocks
from hpc_ctr.comm.trace import Trace


class HierarchicalAllreduce(BlockwiseAllreduce):
    """Sums over all ranks of ``comm``; ``nodes`` lists the ranks of each node, a partition of them.

    Added in the order of ranks inside nodes, and of nodes: the same bits on every rank and in every run.
    """

    backend = "hierarchical"

    def __init__(self, comm: Any, nodes: list[list[int]], note: str = "", piece_elements: int = 1 << 23,
                 trace: Trace | None = None) -> None:
        from mpi4py import MPI

        mine = next(i for i, node in enumerate(nodes) if comm.rank in node)
        rank, size = self._place(comm, nodes, mine)
        super().__init__(rank, size, note, trace, piece_elements)
        self.comm, self.nodes = comm, nodes
        self._shares = min(len(node) for node in nodes)
        self._members = nodes[mine]
        index = self._members.index(comm.rank)
        self._inside = comm.Split(mine, index)
        has_share = index < self._shares
        self._rail_ranks = [node[index] for node in nodes] if has_share else []
        self._rail = comm.Split(index if has_share else MPI.UNDEFINED, mine)
        self._index = index

    @staticmethod
    def _place(comm: Any, nodes: list[list[int]], mine: int) -> tuple[int, int]:
        """rank and size of the sum."""
        return comm.rank, comm.size

    def _twin(self) -> BlockwiseAllreduce:
        return type(self)(self.comm.Dup(), self.nodes, "", self.piece_elements, self.trace.ahead())

    def _sum_array(self, flat: np.ndarray, purpose: str) -> None:
        bounds = even_bounds(len(flat), self._shares, len(self._members))
        self._sum_inside(flat, bounds, purpose)
        if self._index < self._shares:
            share = flat[bounds[self._index]:bounds[self._index + 1]]
            nodes = len(self.nodes)
            rail_bounds = even_bounds(len(share), nodes, nodes)
            parts = self._parts(flat, len(share) + nodes ** 2)
            sum_blocks(self._rail, share, rail_bounds, parts, self.trace, purpose, self._rail_ranks)
            spread_blocks(self._rail, share, rail_bounds, self.trace, purpose, self._rail_ranks)
        spread_blocks(self._inside, flat, bounds, self.trace, purpose, self._members)

    def _sum_inside(self, flat: np.ndarray, bounds: np.ndarray, purpose: str) -> None:
        largest = -(-len(flat) // self._shares)
        parts = self._parts(flat, largest * len(self._members))
        sum_blocks(self._inside, flat, bounds, parts, self.trace, purpose, self._members)


class RailAllreduce(HierarchicalAllreduce):
    """Sums over nodes, whose ranks all hold the same bits: a node counts once, and nothing is summed inside it.

    rank is the number of this rank's node, size how many nodes there are.
    """

    peers = "node"

    @staticmethod
    def _place(comm: Any, nodes: list[list[int]], mine: int) -> tuple[int, int]:
        return mine, len(nodes)

    def _sum_inside(self, flat: np.ndarray, bounds: np.ndarray, purpose: str) -> None:
        pass  # the same on all of them already
