"""Options about the machines of a job: the section ``cluster`` of a job file."""

from dataclasses import dataclass

from hpc_ctr.errors import UsageError


@dataclass
class ClusterOptions:
    """How ranks are grouped into nodes."""

    ranks_per_node: int = 0  # so many ranks of a host count as a node of their own (to try several nodes on one); 0: all

    def check(self) -> None:
        """Raises UsageError naming the setting."""
        if self.ranks_per_node < 0:
            raise UsageError(f"cluster.ranks_per_node: must be at least 0, not {self.ranks_per_node}")
