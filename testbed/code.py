"""The code that a kept result depends on, as text: what code made is made anew when the code means something else."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path


def code_of(module: str, *within: str) -> str:
    """Code of a module and of all that it imports, directly or not, from some packages.

    Comments, docstrings and layout are left out.

    Args:
        module: dotted name.
        within: dotted names of packages or modules; imports from elsewhere are not followed.

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
def _meaning(name: str, within: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The code of a module without comments and docstrings, and the modules of the packages that it imports."""
    origin = _origin(name)
    package = name if origin.endswith("__init__.py") else name.rpartition(".")[0]
    tree = ast.parse(Path(origin).read_text())
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            imported += [source, *(f"{source}.{alias.name}" for alias in node.names)]
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    inside = [each for each in imported if any(f"{each}.".startswith(f"{place}.") for place in within)]
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
    files = (f"{last}.py", f"{last}/__init__.py")
    return not parent or any((Path(place) / file).is_file() for place in places for file in files)
