"""Classes and a strategy for each class, from a measured head map and a byte budget: what is predicted, and the search.

Bytes are those of the pages that a plan keeps (`policies.plan.PageBytes`), rounded up to the blocks that pools grow
by. The predicted loss of a head is what it was measured to lose when it alone keeps sinks and a window, shrunk with
what the wider window leaves out:

    needles: importance * (share of the context outside of the window): an answer may be anywhere
    text:    text importance * (mass beyond the window / mass beyond the window it was measured with)

Losses of heads do not add up when many are cut at once, so the sum ranks strategies; it is no forecast of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from policies.base import Head
from policies.formats.one import FORMATS
from policies.plan import PageBytes
from policies.ranks import places
from testbed.cache.layout import CacheConfig, Hot
from testbed.heads.calibration import CalibrationConfig
from testbed.heads.headmap import HeadMap, HeadMapError
from testbed.workloads.base import check_fraction, check_list, check_whole

WINDOWS = {"head_window90": 0.10, "head_window95": 0.05, "head_window99": 0.01}
WORTH = ("head_restrict_kl", "retrieval_score")
BLOCK_PAGES = {Head.LOCAL: 16, Head.GLOBAL: 16, Head.SPECIAL: 16}


@dataclass(frozen=True)
class Search:
    """What is tried; built by Hydra from conf/heads_recommend.yaml.

    Attributes:
        local_tokens, special_tokens: windows of LOCAL and SPECIAL heads.
        local_shares, global_shares: shares of the heads, of least and of most importance; the rest is SPECIAL.
        local_formats, special_formats, global_formats: compute, int8, int4.
        int8_nats, int4_nats: mean KL when every head is kept in that format, as measured.
    """

    local_tokens: Sequence[int]
    special_tokens: Sequence[int]
    local_shares: Sequence[float]
    global_shares: Sequence[float]
    local_formats: Sequence[str]
    special_formats: Sequence[str]
    global_formats: Sequence[str]
    int8_nats: float
    int4_nats: float

    def __post_init__(self) -> None:
        """Checks what Hydra's instantiate does not."""
        for key in ("local_tokens", "special_tokens"):
            object.__setattr__(self, key, check_list(f"search.{key}", getattr(self, key)))
            for tokens in getattr(self, key):
                check_whole(f"search.{key}", tokens, 1)
        for key in ("local_shares", "global_shares"):
            object.__setattr__(self, key, check_list(f"search.{key}", getattr(self, key)))
            for share in getattr(self, key):
                check_fraction(f"search.{key}", share)
        for key in ("local_formats", "special_formats", "global_formats"):
            object.__setattr__(self, key, check_list(f"search.{key}", getattr(self, key)))
            for name in getattr(self, key):
                if name not in FORMATS:
                    raise HeadMapError(f"search.{key}={name!r}: must be one of {', '.join(FORMATS)}")
        for key in ("int8_nats", "int4_nats"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise HeadMapError(f"search.{key}={value!r}: must be a number of at least 0")

    def strategies(self) -> Iterator[Strategy]:
        """Every combination that is one."""
        shares = product(self.local_shares, self.global_shares)
        windows = list(product(self.local_tokens, self.special_tokens))
        formats = list(product(self.local_formats, self.special_formats, self.global_formats))
        for local, everything in shares:
            if local + everything <= 1:
                for of_window, of_format in product(windows, formats):
                    yield Strategy(local, everything, *of_window, *of_format)

    def noise(self, name: str) -> float:
        """Mean KL when every head is kept in that format."""
        return {"compute": 0.0, "int8": self.int8_nats, "int4": self.int4_nats}[name]


@dataclass(frozen=True)
class Strategy:
    """How heads are split by importance, and what each class keeps."""

    local_share: float
    global_share: float
    local_tokens: int
    special_tokens: int
    local_format: str
    special_format: str
    global_format: str

    def is_plain(self, place: Place) -> bool:
        """False where SPECIAL heads would keep everything, as GLOBAL ones do, or no more than LOCAL ones."""
        _, special, _ = self.heads(place.heads)
        return not special or self.local_tokens < self.special_tokens < place.length_tokens

    def heads(self, total: int) -> tuple[int, int, int]:
        """(LOCAL, SPECIAL, GLOBAL) heads of so many."""
        local, below = round(self.local_share * total), round((1 - self.global_share) * total)
        return local, below - local, total - below


@cache
def kept_pages(hot: Hot, length_tokens: int, window_tokens: float, quota: bool) -> int:
    """Pages of one head in L1: those that touch its window, hot ones excluded; or a quota beside the hot ones."""
    mask = hot.mask(length_tokens)
    if quota:
        return min(math.ceil(window_tokens / hot.page_tokens), int((~mask).sum()))
    end = ((torch.arange(len(mask)) + 1) * hot.page_tokens).clamp(max=length_tokens)
    return int(((end > length_tokens - window_tokens) & ~mask).sum())


@dataclass(frozen=True)
class Place:
    """Where strategies are predicted: a model's heads in a context of a length, in a cache."""

    heads: int
    length_tokens: int
    hot: Hot
    page_bytes: PageBytes
    full_bytes: int

    @staticmethod
    def of(layers: int, kv_heads: int, head_dim: int, cache: CacheConfig, length_tokens: int) -> Place:
        """A context in a cache; the full cache is counted in bf16."""
        check_whole("length", length_tokens, 1)
        return Place(
            heads=layers * kv_heads,
            length_tokens=length_tokens,
            hot=Hot(cache.page_tokens, cache.sink_tokens, cache.hot_tokens),
            page_bytes=cache.page_bytes(head_dim, with_bounds=False),
            full_bytes=layers * kv_heads * length_tokens * 2 * head_dim * torch.bfloat16.itemsize,
        )

    @property
    def fixed_bytes(self) -> int:
        """Sinks, ring and page tables of all heads."""
        pages = self.hot.pages(self.length_tokens)
        ring = self.hot.stream_pages * self.page_bytes.compute
        return self.heads * (ring + pages * self.page_bytes.metadata)

    def device_bytes(self, strategy: Strategy) -> int:
        """What the device holds under a strategy, the slack of begun blocks included."""
        local, special, everything = strategy.heads(self.heads)
        total = self.fixed_bytes
        for head, heads, window, name in (
            (Head.LOCAL, local, strategy.local_tokens, strategy.local_format),
            (Head.SPECIAL, special, strategy.special_tokens, strategy.special_format),
            (Head.GLOBAL, everything, math.inf, strategy.global_format),
        ):
            pages = heads * kept_pages(self.hot, self.length_tokens, window, head == Head.SPECIAL)
            blocks = -(-pages // BLOCK_PAGES[head])
            total += blocks * BLOCK_PAGES[head] * self.page_bytes.by_code(FORMATS[name])
        return total


@dataclass(frozen=True)
class Worth:
    """What heads lose, from a head map; heads in order of importance, the least first.

    Attributes:
        measure: name of the importance.
        needle: [H] importance of each head, at least 0.
        text: [H] the same on plain text, zeros where the map has none.
        reach: [H, 3] tokens that hold 90, 95 and 99 % of a head's mass, or None.
        cut_tokens: the window that heads were measured with.
        order: [L, Hk] int64, each head's place.
    """

    measure: str
    needle: Tensor
    text: Tensor
    reach: Tensor | None
    cut_tokens: int
    order: Tensor

    @staticmethod
    def of(head_map: HeadMap, measure: str | None = None) -> Worth:
        """From a map.

        Raises:
            HeadMapError: the map lacks the measure, or every one that tells what heads are worth.
            WorkloadError: the window that it was measured with is no number of tokens.
        """
        known = [name for name in WORTH if name in head_map.measures]
        if measure is None and not known:
            raise HeadMapError(f"the head map has none of {', '.join(WORTH)}: say importance=MEASURE")
        name = measure or known[0]
        settings = head_map.settings.get("calibration", head_map.settings)  # of `analyse`, or of a group of measures
        if not isinstance(settings, Mapping):
            raise HeadMapError(
                f"settings.calibration={settings!r}: must hold the settings that heads were measured with"
            )
        cut_tokens = settings.get("local_window_tokens", CalibrationConfig.local_window_tokens)
        check_whole("settings.local_window_tokens", cut_tokens, 1)
        value = head_map.measure(name).value
        place = places(value.flatten())
        order = place.long().argsort()
        zeros = torch.zeros_like(value)
        text = head_map.measures[f"{name}_text"].value if f"{name}_text" in head_map.measures else zeros
        reach = None
        if all(window in head_map.measures for window in WINDOWS):
            reach = torch.stack([head_map.measures[window].value.flatten()[order] for window in WINDOWS], -1)
        return Worth(
            measure=name,
            needle=value.flatten()[order].clamp(min=0).double(),
            text=text.flatten()[order].clamp(min=0).double(),
            reach=None if reach is None else reach.double(),
            cut_tokens=cut_tokens,
            order=place.reshape(value.shape).long(),
        )

    def beyond(self, window_tokens: float) -> Tensor:
        """[H] share of a head's mass beyond a window and the sinks: between the measured windows log-linear in both."""
        if self.reach is None:
            return torch.ones_like(self.needle)
        if math.isinf(window_tokens):
            return torch.zeros_like(self.needle)
        levels = torch.tensor([1.0, *WINDOWS.values()], dtype=torch.float64).log()
        edges = torch.cat((torch.ones(len(self.reach), 1, dtype=torch.float64), self.reach), -1).cummax(-1).values
        # Windows of one token and equal windows would make steps of no width.
        edges = edges.log() + torch.arange(4, dtype=torch.float64) * 1e-6
        at = torch.full((len(edges), 1), math.log(max(window_tokens, 1.0)), dtype=torch.float64)
        right = torch.searchsorted(edges, at, right=True).clamp(1, 3)
        x0, x1 = edges.gather(1, right - 1), edges.gather(1, right)
        y0, y1 = levels[right - 1], levels[right]
        return (y0 + (at - x0) / (x1 - x0) * (y1 - y0)).clamp(max=0).exp().squeeze(1)

    def lost(self, window_tokens: float, length_tokens: int) -> Tensor:
        """[H] nats, or the measure's unit, lost by each head with that window; 0 for the whole context."""
        if window_tokens >= length_tokens:
            return torch.zeros_like(self.needle)
        outside = 1 - window_tokens / length_tokens
        cut = self.beyond(self.cut_tokens).clamp(min=1e-9)
        return self.needle * outside + self.text * (self.beyond(window_tokens) / cut).clamp(max=1.0)

    def classes(self, strategy: Strategy) -> Tensor:
        """[L, Hk] int8 of `Head`."""
        local, special, _ = strategy.heads(len(self.needle))
        out = torch.full(self.order.shape, int(Head.GLOBAL), dtype=torch.int8)
        out[self.order < local + special] = int(Head.SPECIAL)
        out[self.order < local] = int(Head.LOCAL)
        return out


@dataclass(frozen=True)
class Recommended:
    """A strategy with what is predicted of it.

    Attributes:
        device_bytes: at the length asked for.
        window_loss: sum over heads of what their windows cost alone, in the measure's unit.
        format_loss: what formats cost, nats.
    """

    strategy: Strategy
    device_bytes: int
    window_loss: float
    format_loss: float

    @property
    def loss(self) -> float:
        """What strategies are ranked by."""
        return self.window_loss + self.format_loss


def recommend(worth: Worth, place: Place, search: Search, budget_bytes: int) -> Recommended:
    """The strategy of least predicted loss within the budget; of equals the one of fewer bytes.

    Raises:
        HeadMapError: the budget is below every strategy.
    """
    lost = {tokens: worth.lost(tokens, place.length_tokens).cumsum(0) for tokens in _windows(search)}
    best: Recommended | None = None
    least = math.inf
    for strategy in search.strategies():
        if not strategy.is_plain(place):
            continue
        size = place.device_bytes(strategy)
        least = min(least, size)
        if size > budget_bytes:
            continue
        found = Recommended(strategy, size, *_losses(strategy, lost, search, place.heads))
        if best is None or (found.loss, found.device_bytes) < (best.loss, best.device_bytes):
            best = found
    if best is None:
        raise HeadMapError(
            f"budget of {budget_bytes} bytes for {place.length_tokens} tokens: the smallest strategy tried takes "
            f"{int(least)}; raise budget.fraction, or lower search.local_tokens, cache.hot_tokens"
        )
    return best


def _windows(search: Search) -> set[int]:
    return {*search.local_tokens, *search.special_tokens}


def _losses(strategy: Strategy, lost: Mapping[int, Tensor], search: Search, heads: int) -> tuple[float, float]:
    """(windows, formats) of a strategy; `lost` holds sums over the heads up to each."""
    local, special, everything = strategy.heads(heads)
    windows = float(lost[strategy.local_tokens][local - 1]) if local else 0.0
    if special:
        upto = lost[strategy.special_tokens]
        windows += float(upto[local + special - 1]) - (float(upto[local - 1]) if local else 0.0)
    formats = sum(
        search.noise(name) * count / heads
        for name, count in (
            (strategy.local_format, local),
            (strategy.special_format, special),
            (strategy.global_format, everything),
        )
    )
    return windows, formats
