"""Train click-through-rate models whose embedding tables are far larger than memory, on MPI."""

__version__ = "0.1.0"
