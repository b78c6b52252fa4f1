"""The contract of a signal source, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch import Tensor

from testbed.models.base import Decoder, Geometry

State = Tensor | int | float
"""What a source can save."""


class SignalError(ValueError):
    """A signal that can't be computed."""


@dataclass(frozen=True)
class PrefillChunk:
    """One layer of one chunk of a prefill.

    Attributes:
        q: [Hq, T, D] queries of the chunk.
        lse: [Hq, T] log-sum-exp, base 2, of their full attention.
        k: [Hk, start + T, D] all keys so far.
        start: position of the first query.
        total: tokens of the whole context.
        v: [Hk, start + T, D] all values so far; None where nobody kept them.
        hidden: [T, C] what the layer's attention was given; None where nobody looked.
    """

    layer: int
    q: Tensor
    lse: Tensor
    k: Tensor
    start: int
    total: int
    geometry: Geometry
    v: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True)
class StepView:
    """What a finished step showed.

    Attributes:
        queries: per layer [Hk, G, T, D], or None if no source wanted them.
        mass: [L, Hk, N] float32, share of attention each page got, mean over the group and the T queries; None if
            no source wanted it.
        tokens: T, queries run.
        step: decode steps so far.
        hidden: [L, C] float32, what each layer's attention was given for the last token; None if no source wanted it.
    """

    queries: Sequence[Tensor] | None
    mass: Tensor | None
    tokens: int
    step: int
    hidden: Tensor | None = None


@dataclass(frozen=True)
class SignalContext:
    """What a source is built with, beside its YAML.

    Attributes:
        page_tokens: P.
        head_measures: gives the calibrated measures of the model's heads, name -> [L, Hk].
        decoder: the model, for its embeddings and its name; None where sources need neither.
    """

    page_tokens: int
    head_measures: Callable[[], Mapping[str, Tensor]]
    decoder: Decoder | None = None


@dataclass(frozen=True)
class Observed:
    """Where a value is asked for.

    Attributes:
        shape: (L, Hk, N) of the array to return.
        page_tokens: P.
        key_bounds: gives minimum and maximum key of each page, [S, N, D] each.
    """

    shape: tuple[int, int, int]
    page_tokens: int
    key_bounds: Callable[[], tuple[Tensor, Tensor]]


class PrefillWatcher(Protocol):
    """Whoever looks on while a context is prefilled."""

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Sees every layer of every chunk."""
        ...


class SignalSource(PrefillWatcher, Protocol):
    """One named signal of one sequence."""

    @property
    def wants_mass(self) -> bool:
        """Whether it reads the page masses of each step."""
        ...

    @property
    def wants_queries(self) -> bool:
        """Whether it reads the queries of each step."""
        ...

    @property
    def wants_bounds(self) -> bool:
        """Whether the cache must keep key bounds."""
        ...

    @property
    def wants_hidden(self) -> bool:
        """Whether it reads the hidden states of each step."""
        ...

    @property
    def wants_truth(self) -> bool:
        """Whether it must know how the full cache will attend: then one runs beside the session, a step ahead."""
        ...

    def watch_tokens(self, tokens: Tensor) -> None:
        """Sees the context's tokens, then each generated one."""
        ...

    def watch_roles(self, roles: Tensor) -> None:
        """Sees the role of each token that `watch_tokens` is about to be shown: [T] int8 of `Role`, -1 = unknown."""
        ...

    def watch_turn(self, tokens: Tensor) -> None:
        """Sees the tokens of a turn before they are run."""
        ...

    def watch_next(self, tokens: Tensor) -> None:
        """Sees the tokens of the coming run, [T], before the plan for it: part of a turn, or the newest token."""
        ...

    def watch_truth(self, mass: Tensor) -> None:
        """Sees, before the plan, what each page will get in the coming run under the full cache: [L, Hk, N] shares."""
        ...

    def watch_lock(self, begin: int, end: int) -> None:
        """Sees which tokens, from `begin` up to `end`, the user wants kept whatever else matters."""
        ...

    def watch_step(self, view: StepView) -> None:
        """Sees every step after it."""
        ...

    def value(self, observed: Observed) -> Tensor:
        """The signal now, pages that nothing is known about at 0: [L, Hk, N] unless its YAML says otherwise."""
        ...

    def fork(self) -> SignalSource:
        """An independent copy."""
        ...

    def state(self) -> dict[str, State]:
        """All that was learnt so far, for a saved session; a name may hold dots."""
        ...

    def restore(self, state: Mapping[str, State]) -> None:
        """Takes over what `state` of a source built in the same way gave."""
        ...


class Source:
    """Defaults: watch nothing, want nothing, save whatever attributes hold."""

    wants_mass = False
    wants_queries = False
    wants_bounds = False
    wants_hidden = False
    wants_truth = False

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Nothing."""

    def watch_tokens(self, tokens: Tensor) -> None:
        """Nothing."""

    def watch_roles(self, roles: Tensor) -> None:
        """Nothing."""

    def watch_turn(self, tokens: Tensor) -> None:
        """Nothing."""

    def watch_next(self, tokens: Tensor) -> None:
        """Nothing."""

    def watch_truth(self, mass: Tensor) -> None:
        """Nothing."""

    def watch_lock(self, begin: int, end: int) -> None:
        """Nothing."""

    def watch_step(self, view: StepView) -> None:
        """Nothing."""

    def fork(self) -> Source:
        """A copy: tensors that are replaced, never written in place, may be shared."""
        import copy

        return copy.copy(self)

    def state(self) -> dict[str, State]:
        """Attributes that are tensors, numbers, lists of tensors or sources; texts and None go without saying.

        Raises:
            SignalError: an attribute of another kind, which a source must save itself.
        """
        out: dict[str, State] = {}
        for name, value in vars(self).items():
            if isinstance(value, State):
                out[name] = value
            elif isinstance(value, Source):
                out |= {f"{name}.{inner}": each for inner, each in value.state().items()}
            elif isinstance(value, list) and all(isinstance(each, Tensor) for each in value):
                out |= {f"{name}.{index}": each for index, each in enumerate(value)}
            elif value is not None and not isinstance(value, str):
                what = f"{type(self).__name__}.{name} is a {type(value).__name__}"
                raise SignalError(f"{what}: override `state` and `restore` to save it")
        return out

    def restore(self, state: Mapping[str, State]) -> None:
        """Sets every attribute as it was; one that `state` does not name was None or an empty list."""
        for name, value in list(vars(self).items()):
            inner = {key[len(name) + 1 :]: each for key, each in state.items() if key.startswith(f"{name}.")}
            if name in state:
                setattr(self, name, state[name])
            elif isinstance(value, Source):
                value.restore(inner)
            elif isinstance(value, list) or inner:
                setattr(self, name, [inner[str(index)] for index in range(len(inner))])
            elif isinstance(value, Tensor):
                setattr(self, name, None)


def fit_pages(x: Tensor | None, shape: tuple[int, int, int]) -> Tensor:
    """X [L, Hk, n] padded with zeros, or cut, to N pages; zeros for None."""
    if x is None:
        return torch.zeros(shape)
    return torch.nn.functional.pad(x, (0, shape[2] - x.shape[2]))


def build_sources(
    names: frozenset[str], context: SignalContext, overrides: Mapping[str, Mapping[str, object]] | None = None
) -> dict[str, SignalSource]:
    """Sources of the named signals, from conf/signal/<name>.yaml.

    Args:
        names: what the policy's parts declared.
        context: what sources are built with.
        overrides: name -> keys that replace those of its YAML.

    Raises:
        SignalError: no YAML of that name, or an argument it does not have.
    """
    folder = resources.files("conf") / "signal"
    known = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    unknown = sorted((names | set(overrides or {})) - set(known))
    if unknown:
        pages = ", ".join(name for name in known if not name.startswith("head_"))
        raise SignalError(f"unknown signal {unknown[0]!r}; known: {pages}, and the measures head_* of conf/signal")
    sources = {}
    for name in sorted(names):
        arguments: Any = OmegaConf.to_container(OmegaConf.create((folder / f"{name}.yaml").read_text()))
        target = get_class(arguments.pop("_target_"))
        given = (overrides or {}).get(name, {})
        surplus = sorted(set(given) - set(arguments))
        if surplus:
            allowed = ", ".join(sorted(arguments)) or "none"
            raise SignalError(f"unknown key 'signals.{name}.{surplus[0]}'; there are: {allowed}")
        # Called here and not through Hydra's instantiate, which would bury a source's own error in one of its own.
        try:
            sources[name] = target(context=context, **(arguments | dict(given)))
        except TypeError as error:  # a text where a number belongs
            raise SignalError(f"signals.{name}={given!r}: {error}") from error
    return sources
