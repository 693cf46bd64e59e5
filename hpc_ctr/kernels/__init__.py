"""Loops over plain arrays, compiled by numba: no files, no ranks."""
