"""Readers, keys, order of the data, and the batches they give."""
