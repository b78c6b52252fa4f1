"""Puts this folder on the path of every test, for `import warm` and `import full_disk`."""
