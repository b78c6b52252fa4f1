"""What every part checks: its fields when it is built, and the signals it reads when it is asked.

Hydra's instantiate checks no types, and a NaN signal would silently sort first or last, so both are refused here
with an error that names the key, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from policies.base import Head, PolicyError, Signals


def require_whole(part: object, key: str, least: int, optional: bool = False) -> None:
    """The field is a whole number of at least `least` (or None, when optional)."""
    value = getattr(part, key)
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = f"a whole number of at least {least}" + (", or null" if optional else "")
        raise PolicyError(f"{type(part).__name__}.{key}={value!r}: must be {allowed}")


def require_number(part: object, key: str, least: float, most: float = math.inf, below: bool = False) -> None:
    """The field is a finite number from `least` to `most` (less than `most`, when below)."""
    value = getattr(part, key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most or (below and value == most):
        upper = "" if math.isinf(most) else f" and {'less than' if below else 'at most'} {most:g}"
        raise PolicyError(f"{type(part).__name__}.{key}={value!r}: must be a number of at least {least:g}{upper}")


def require_choice(part: object, key: str, allowed: Collection[str]) -> None:
    """The field is one of the allowed names."""
    value = getattr(part, key)
    if not isinstance(value, str) or value not in allowed:
        raise PolicyError(f"{type(part).__name__}.{key}={value!r}: must be one of {', '.join(allowed)}")


def require_name(part: object, key: str) -> None:
    """The field is a name that a signal can have."""
    value = getattr(part, key)
    if not isinstance(value, str) or not value.isidentifier():
        raise PolicyError(f"{type(part).__name__}.{key}={value!r}: must be the name of a signal")


def check_quantiles(part: object) -> None:
    """Its local_quantile and global_quantile are in [0, 1] and in order.

    Raises:
        PolicyError: they are not.
    """
    require_number(part, "local_quantile", 0, 1)
    require_number(part, "global_quantile", 0, 1)
    low, high = (getattr(part, key) for key in ("local_quantile", "global_quantile"))
    if low > high:
        raise PolicyError(f"{type(part).__name__}.local_quantile={low}: must be at most global_quantile={high}")


def page_signal(signals: Signals, name: str, expand: bool = True) -> Tensor:
    """The named signal about pages: [L, Hk, N] float32, finite; a signal given as [N] holds for every stream.

    Args:
        signals: what the executor computed.
        name: which of them.
        expand: False gives a signal that is the same for every stream as [N], so that work on it is done once.

    Raises:
        PolicyError: it was not computed, has another shape, or holds NaN or infinities.
    """
    value = signals[name]
    if value.shape not in (signals.shape, signals.shape[2:]):
        raise PolicyError(f"signal {name!r} has shape {tuple(value.shape)}: must be {signals.shape} or [pages]")
    if value.ndim == 3 and value.stride()[:2] == (0, 0):
        value = value[0, 0]
    value = _finite(value, name)
    return value.expand(signals.shape) if expand else value


def head_signal(signals: Signals, name: str) -> Tensor:
    """The named signal about heads: [L, Hk] float32, finite.

    Raises:
        PolicyError: it was not computed, has another shape, or holds NaN or infinities.
    """
    value = signals[name]
    if value.shape != signals.shape[:2]:
        raise PolicyError(f"signal {name!r} has shape {tuple(value.shape)}: must be {signals.shape[:2]}")
    return _finite(value, name)


def _finite(value: Tensor, name: str) -> Tensor:
    # The extremes tell: they are NaN if anything is, and reading them takes a twentieth of looking at each value.
    if value.numel() and not all(bool(torch.isfinite(extreme)) for extreme in value.aminmax()):
        raise PolicyError(f"signal {name!r} holds NaN or infinite values: whoever computed it is wrong")
    return value.float()


def head_classes(signals: Signals) -> Tensor:
    """[L, Hk] int8 of `Head`; before anything is classified every head is dense."""
    if signals.classes is not None:
        return signals.classes
    return torch.full(signals.shape[:2], int(Head.DENSE), dtype=torch.int8, device=signals.device)
