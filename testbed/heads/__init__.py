"""Which heads: measures of attention heads, maps of them, and what the maps are worth. `python -m testbed.heads`."""
