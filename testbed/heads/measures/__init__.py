"""Measures of attention heads: watchers of a prefill that stream over blocks of queries."""
