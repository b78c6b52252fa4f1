"""What counts as another code, and what does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import code
from testbed.code import code_of

FILES = {
    "__init__.py": "",
    "first.py": "import house.second\nfrom . import third, room\nimport json\n\ndef f():\n    return 1\n",
    "room/__init__.py": "from .bed import b\n",
    "room/bed.py": "from ..fourth import x as b\n",
    "second.py": "from house.fourth import x\n",
    "third.py": "y = 1\n",
    "fourth.py": "x = 1\n\ndef g():\n    import house.first\n",
    "apart.py": "z = 1\n",
}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "house"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def seen() -> str:
    code._meaning.cache_clear()
    return code_of("house.first", "house")


@pytest.mark.parametrize("name", ["first.py", "second.py", "third.py", "fourth.py", "room/__init__.py", "room/bed.py"])
def test_whatever_is_imported_counts_and_words_do_not(name: str, house: Path) -> None:
    before = seen()
    assert before.count("house.") >= 6
    file = house / name
    file.write_text(f'"""A word."""\n\n{FILES[name]}\n# another\n')
    assert seen() == before
    file.write_text(FILES[name].replace("1", "2") if "1" in FILES[name] else f"{FILES[name]}w = 2\n")
    assert seen() != before


def test_what_is_not_imported_or_lies_outside_does_not_count(house: Path) -> None:
    before = seen()
    (house / "apart.py").write_text("z = 2\n")
    assert seen() == before
    assert "json" not in [line.partition(":")[0] for line in before.splitlines()]
    assert "house.fourth: " not in code_of("house.first", "elsewhere")
    assert "house.fourth: " in code_of("house.second", "elsewhere", "house.fourth")


def test_no_such_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"testbed\.nothing_like_it"):
        code_of("testbed.nothing_like_it", "testbed")
