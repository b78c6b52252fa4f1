"""`core_score`: the learned predictor's estimate of the mass each page will draw at the coming step.

`core_score_light` is the same without the pages' key bounds, which take device memory and most of the time.

Its features are what a session has seen when a plan is due, the coming token included. A page's key bounds are taken
apart into centre and radius: Quest's bound (arXiv 2406.10774), centre . q + radius . |q|, adds the two in full, while
the best key of a page lies well below it; how far below, the network learns for each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.scoring import query_bound
from policies.base import Role
from testbed.engine.signals.base import Observed, PrefillChunk, SignalContext, SignalError, Source, State, StepView
from testbed.engine.signals.embedding import Embedding
from testbed.engine.signals.history import History
from testbed.engine.signals.retrieval import Retrieval
from testbed.engine.signals.role import RoleSource
from testbed.predictor.network import Network, NetworkShape, layer_groups
from testbed.predictor.weights import WeightsError, load_weights

GROUPS = 6
FLOOR = 1e-3  # of an even share of the mass; what is less is as good as nothing
TIGHT, LOOSE, MEAN = 0.2, 0.5, 0.35  # share of the radius that counts
MASS = ("mass_fast", "mass_mid", "mass_slow", "mass_last", "mass_before", "mass_after", "mass_window")
SHARED_MASS = ("mass_layer", "mass_model", "mass_document")
QUERY = ("bound_tight", "bound_loose", "bound_mean", "centre_best", "centre_mean", "radius_best")
WORDS = ("same_word", "after_word", "after_word_share", "after_pair_share", "after_triple", "after_last_share")
PLACE = ("age", "place", "document", "bm25", "embedding")
ROLES = tuple(f"role_{role.name.lower()}" for role in Role)
NAMES = (*MASS, *SHARED_MASS, *QUERY, *WORDS, *PLACE, *ROLES)
LIGHT = tuple(name for name in NAMES if name not in QUERY)
_MIX = 1_000_003  # a prime; words next to each other are told apart by their sum with such factors, modulo 2^64


class CoreFeatures(Source):
    """Features of all pages, and their score by trained weights.

    Args:
        context: of the session; its decoder says which weights fit.
        weights: file of trained weights; None = those of the model, trained here or packaged. They are read when
            the score is first asked for, so that features can be had before anything is trained.
        bounds: whether the pages' key bounds are kept and read.

    Attributes:
        names: of the features, in order.
    """

    wants_mass = True
    wants_hidden = True

    def __init__(self, context: SignalContext, weights: str | None = None, bounds: bool = True) -> None:
        if context.decoder is None:
            raise SignalError("signal core_score: needs a session's decoder")
        self.wants_bounds = self.wants_queries = bounds
        self.names, self._name = (NAMES, "core_score") if bounds else (LIGHT, "core_score_light")
        self._decoder, self._path = context.decoder, None if weights is None else Path(weights).expanduser()
        self._network: Network | None = None
        self._groups = layer_groups(self._decoder.geometry.layers, min(GROUPS, self._decoder.geometry.layers))
        self.history, self.roles = History(context, queries=bounds), RoleSource(context)
        self.retrieval, self.embedding = Retrieval(context), Embedding(context)
        self._hidden = torch.zeros(self._decoder.geometry.layers, self._decoder.width)

    @property
    def _sources(self) -> dict[str, Source]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Source)}

    def watch_prefill(self, chunk: PrefillChunk) -> None:
        """Shows it to those it is made of; keeps the last hidden state."""
        for source in self._sources.values():
            source.watch_prefill(chunk)
        if chunk.hidden is not None and chunk.start + len(chunk.hidden) == chunk.total:
            row = torch.tensor([chunk.layer])
            self._hidden = self._hidden.index_copy(0, row, chunk.hidden[-1:].float().cpu())  # type: ignore[union-attr]

    def watch_tokens(self, tokens: Tensor) -> None:
        """Shows it to those it is made of."""
        for source in self._sources.values():
            source.watch_tokens(tokens)

    def watch_roles(self, roles: Tensor) -> None:
        """Shows it to those it is made of."""
        for source in self._sources.values():
            source.watch_roles(roles)

    def watch_turn(self, tokens: Tensor) -> None:
        """Shows it to those it is made of."""
        for source in self._sources.values():
            source.watch_turn(tokens)

    def watch_next(self, tokens: Tensor) -> None:
        """Shows it to those it is made of."""
        for source in self._sources.values():
            source.watch_next(tokens)

    def watch_step(self, view: StepView) -> None:
        """Shows it to those it is made of; keeps the last hidden state."""
        for source in self._sources.values():
            source.watch_step(view)
        if view.hidden is not None:
            self._hidden = view.hidden.float().cpu()

    def context(self) -> Tensor:
        """What is known of the coming token, [groups, 2 C] float32: hidden state of the last, embedding of the next.

        The hidden state is the mean over a group's layers; both parts have mean square 1, or are 0 where unknown.
        """
        groups = int(self._groups[-1]) + 1
        share = (self._groups == torch.arange(groups).unsqueeze(1)).float()
        hidden = share @ self._hidden / share.sum(1, keepdim=True)
        coming = self.history.coming()
        word = torch.zeros(self._decoder.width)
        if len(coming):
            word = self._decoder.embed(coming[-1:].to(self._decoder.device))[0].float().cpu()
        return torch.cat((_unit(hidden), _unit(word).expand(groups, -1)), 1)

    def features(self, observed: Observed) -> Tensor:
        """[L, Hk, N, F] float32 in the order of `names`; masses as logarithms of multiples of the even share."""
        shape = observed.shape
        rows: dict[str, Tensor] = {}
        rows |= self._mass(shape)
        rows |= self._query(observed) if self.wants_bounds else {}
        rows |= self._words(observed)
        rows |= self._place(observed)
        # One block a feature: written in a row each, and a product can read it either way round.
        out = torch.empty(len(self.names), *shape)
        for block, name in zip(out, self.names, strict=True):
            block.copy_(rows[name].expand(shape))
        return out.permute(1, 2, 3, 0)

    def value(self, observed: Observed) -> Tensor:
        """[L, Hk, N] float32: the estimated log mass of each page, up to a constant of the stream.

        Raises:
            SignalError: no weights of this model, or such as do not fit it.
        """
        if self._network is None:
            try:
                self._network = load_weights(self._decoder, self.names, self._path)
            except WeightsError as error:
                raise SignalError(f"signal {self._name}: {error}") from error
        return self._network.score(self.features(observed), self.context())

    def flops(self, pages: int) -> int:
        """Of one score of all streams: the queries' products with the bounds, and the network."""
        geometry = self._decoder.geometry
        products = 2 * 2 * 2 * geometry.query_heads * geometry.head_dim * geometry.layers * pages
        groups, width = int(self._groups[-1]) + 1, 2 * self._decoder.width
        shape = (geometry.layers, geometry.kv_heads, groups, len(self.names), width)
        return products * self.wants_bounds + NetworkShape(*shape).flops(pages)

    def fork(self) -> CoreFeatures:
        """An independent copy; the weights are shared."""
        other = super().fork()
        vars(other).update({name: source.fork() for name, source in self._sources.items()})
        return other  # type: ignore[return-value]

    def state(self) -> dict[str, State]:
        """What was seen; the weights are the model's."""
        inner = {
            f"{name}.{key}": each for name, source in self._sources.items() for key, each in source.state().items()
        }
        return inner | {"hidden": self._hidden}

    def restore(self, state: Mapping[str, State]) -> None:
        """As it was."""
        for name, source in self._sources.items():
            source.restore({key[len(name) + 1 :]: each for key, each in state.items() if key.startswith(f"{name}.")})
        self._hidden = state["hidden"]  # type: ignore[assignment]

    # --- features ----------------------------------------------------------------------------------------------

    def _mass(self, shape: tuple[int, int, int]) -> dict[str, Tensor]:
        """Masses of the page, of its neighbours, of all heads, of its document."""
        averages, last = self.history.averages(shape), _log(self.history.last(shape), shape[2])
        middle = averages[1]
        rows = dict(zip(MASS[:3], _log(averages, shape[2]), strict=True))
        rows |= {"mass_last": last, "mass_window": _log(self.history.window(shape), shape[2])}
        rows |= {"mass_before": pad(last, (1, 0))[..., :-1], "mass_after": pad(last, (0, 1))[..., 1:]}
        run = self._documents(shape[2])
        sums = torch.zeros(*shape[:2], int(run[-1]) + 1 if len(run) else 0).index_add_(2, run, middle)
        means = sums / run.bincount().clamp(min=1)
        rows |= {"mass_document": _log(means[..., run], shape[2])}
        return rows | {
            "mass_layer": _log(middle.mean(1, keepdim=True), shape[2]),
            "mass_model": _log(middle.mean((0, 1), keepdim=True), shape[2]),
        }

    def _query(self, observed: Observed) -> dict[str, Tensor]:
        """What the keys' centres and radii score with the newest and with recent queries."""
        layers, kv_heads, pages = observed.shape
        queries = self.history.queries()
        if queries is None:
            return {name: torch.zeros(1) for name in QUERY}
        low, high = self.history.bounds(observed)
        scale = torch.tensor(self._decoder.geometry.scale).repeat_interleave(kv_heads).view(1, -1, 1, 1)
        q = (queries * scale).transpose(0, 1).flatten(1, 2)  # [S, 2 G, D], the newest first
        # The most that a key could score with q, and with -q; between -least and most lie all keys of the page.
        both = torch.cat((q, -q), 1).unsqueeze(2).to(low.device)
        most, least = query_bound(both, low, high, each_row=True).cpu().chunk(2, 1)
        centre, radius = (((most - least) / 2).unflatten(1, (2, -1)), ((most + least) / 2).unflatten(1, (2, -1)))
        known = radius.sum((1, 2)).isfinite()

        def share(which: int, part: float) -> Tensor:
            """Log of the even share's multiple that a softmax over the pages gives, mean over the group."""
            logits = (centre[:, which] + part * radius[:, which]).masked_fill(~known.unsqueeze(1), -torch.inf)
            return _log(logits.softmax(-1).nan_to_num_().mean(1), pages)

        rows = {"bound_tight": share(0, TIGHT), "bound_loose": share(0, LOOSE), "bound_mean": share(1, MEAN)}
        sizes = {"centre_best": centre[:, 0].amax(1), "centre_mean": centre[:, 0].mean(1)}
        sizes |= {"radius_best": radius[:, 0].amax(1)}
        rows |= {name: _centred(size.where(known, 0.0)) for name, size in sizes.items()}
        return {name: pad(row, (0, pages - row.shape[-1])).view(observed.shape) for name, row in rows.items()}

    def _words(self, observed: Observed) -> dict[str, Tensor]:
        """Where the coming token stood before, and what came after it there: what heads that copy look at. [N] each.

        Of several coming tokens, as at a turn, any counts.
        """
        text, coming = self.history.text(), self.history.coming()
        joined = torch.cat((text[-2:], coming))
        pages, size = observed.shape[2], observed.page_tokens

        def counted(found: Tensor, first: int) -> Tensor:
            at = (found.nonzero().squeeze(1) + first).clamp(max=max(len(text) - 1, 0))
            return torch.bincount(at // size, minlength=pages)[:pages].float()

        word = torch.isin(text, coming)
        pair, triple = (
            torch.isin(_runs(text, words), _runs(joined, words)[max(0, len(joined) - words + 1 - len(coming)) :])
            for words in (2, 3)
        )
        after = counted(word, 1)
        rows = {"same_word": torch.log1p(counted(word, 0)), "after_word": torch.log1p(after)}
        rows |= {"after_word_share": _share(after), "after_pair_share": _share(counted(pair, 2))}
        rows |= {"after_triple": torch.log1p(counted(triple, 3))}
        return rows | {"after_last_share": _share(counted(text[:-1] == text[-1:], 1))}

    def _place(self, observed: Observed) -> dict[str, Tensor]:
        """Where the page is and what it says. [N] each."""
        pages, size = observed.shape[2], observed.page_tokens
        index = torch.arange(pages)
        run = self._documents(pages)
        words = self.retrieval.value(observed)[0, 0]
        meaning = self.embedding.score(pages)
        role = self._roles(pages)
        rows = {
            "age": torch.log(((pages - index) * size).float()),
            "place": index / max(pages, 1),
            "document": (run + 1) / (run.max() + 1) if pages else index.float(),
            "bm25": words / words.max().clamp(min=1e-6) if pages else words,
            "embedding": ((meaning - meaning.mean()) / meaning.std(correction=0).clamp(min=1e-6)).clamp(-4, 4),
        }
        return rows | {name: (role == code).float() for code, name in zip(Role, ROLES, strict=True)}

    def _documents(self, pages: int) -> Tensor:
        """[N] int64: which run of pages of one role each page belongs to, 0 the first."""
        role = self._roles(pages)
        return (role != role.roll(1)).long().index_fill(0, torch.zeros(min(pages, 1), dtype=torch.long), 0).cumsum(0)

    def _roles(self, pages: int) -> Tensor:
        """[N] int8 of `Role`."""
        return self.roles.value(
            Observed((1, 1, pages), self.history.page_tokens, lambda: (self._hidden, self._hidden))  # type: ignore[arg-type]
        )


def _log(mass: Tensor, pages: int) -> Tensor:
    """Log of mass as a multiple of the even share, floored."""
    return torch.log(mass * pages + FLOOR)


def _centred(score: Tensor) -> Tensor:
    """Score [S, N] less its mean over the pages, within what float16 and a network can bear."""
    return (score - score.mean(-1, keepdim=True)).clamp(-30, 30)


def _unit(x: Tensor) -> Tensor:
    """Scaled to a mean square of 1 over the last dimension; 0 stays 0."""
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


def _runs(text: Tensor, words: int) -> Tensor:
    """A number for each run of so many tokens, by its first: [T] -> [T - words + 1] int64."""
    count = max(0, len(text) - words + 1)
    out = torch.zeros(count, dtype=torch.long)
    for at in range(words):
        out = out * _MIX + text[at : at + count]
    return out


def _share(counts: Tensor) -> Tensor:
    """Counts [N] as shares of their sum, of many pages a little each."""
    return counts / (counts.sum() + 1.0)
