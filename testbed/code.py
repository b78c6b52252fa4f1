"""The code that a kept result depends on, as text: what code made is made anew when the code means something else."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def code_of(module: str, within: str) -> str:
    """Code of a module and of all that it imports, directly or not, from a package.

    Comments, docstrings and layout are left out.

    Args:
        module: dotted name.
        within: dotted name of the package; imports from elsewhere are not followed.

    Raises:
        ModuleNotFoundError: no such module.
    """
    done: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done[name], imported = _meaning(name, within)
        waiting += imported
    return "\n".join(f"{name}: {done[name]}" for name in sorted(done))


@cache
def _meaning(name: str, within: str) -> tuple[str, tuple[str, ...]]:
    """The code of a module without comments and docstrings, and the modules of the package that it imports."""
    tree = ast.parse(Path(_origin(name)).read_text())
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    inside = [each for each in imported if f"{each}.".startswith(f"{within}.")]
    return ast.unparse(tree), tuple(each for each in inside if _is_module(each))


def _origin(name: str) -> str:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {name!r}")
    return spec.origin


def _is_module(name: str) -> bool:
    """Whether it is one and not a name in one; `find_spec` of such a name would run the module that it is in."""
    parent, _, last = name.rpartition(".")
    spec = find_spec(parent) if parent else None
    places = () if spec is None else spec.submodule_search_locations or ()
    return not parent or any(
        (Path(place) / f"{last}.py").is_file() or (Path(place) / last).is_dir() for place in places
    )
