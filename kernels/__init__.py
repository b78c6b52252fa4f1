"""Attention over ragged paged streams, page formats and page scoring. Knows tensors only."""
