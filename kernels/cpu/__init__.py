"""The native CPU backend: C++ behind a plain C ABI, built on first use."""
