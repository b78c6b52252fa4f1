"""What the tests of the kernels need of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def _interpreter_knows_numpy() -> Iterator[None]:
    """Triton 3.6's interpreter can't loop to a bound known at run time under numpy 2.4; 3.7 can.

    It takes `int` of an array of one number, which numpy now refuses. Only the interpreter is affected.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6.") or np.lib.NumpyVersion(np.__version__) < "2.4.0":
        yield
        return
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        yield
