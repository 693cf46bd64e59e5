"""Benchmarks and evidence."""
