"""Linear attention as a part of softmax attention: O(1) a token, merged by its own denominator.

    exp(scale q . k)  ~  phi_q(q) . phi_k(k)        s = sum_i phi_k(k_i) v_i^T [F, D],  z = sum_i phi_k(k_i) [F]
    out = phi_q(q) . s / phi_q(q) . z               lse = log2(phi_q(q) . z)

so the result is a `Partial` like any other and merges exactly with pages. Features are kept as base-2 exponents, and
each feature of each stream has its own log2 scale (that of its largest token so far), as softmax keeps a running
maximum: nothing overflows, and the denominator of a stream that holds a token can't underflow.

Relative error of the output, SmolLM2-135M, 90 streams, 1,776 of 2,048 tokens in the state (mean over streams): left
out altogether .268, their plain mean .268; favor .273 with F = 64, .267 with 1,024 (real logits are too large for
random features: their lse is 9 to 13 too low); elu 1.86, .71 with `fit_offset`; anchors .235, .215, .202 with F = 16,
64, 128. Anchors are the map to use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.guards import check_floats, check_int, check_like, check_real
from kernels.prototypes import make_prototypes
from kernels.state import Partial

LOG2_E = math.log2(math.e)
# A feature whose sum falls below this share of what it was when tokens left holds rounding, not tokens.
LOST = 2.0**-18
ANCHOR_TOKENS = 1024


@dataclass(frozen=True)
class FeatureMap:
    """A positive feature map; make one by `favor_map`, `anchor_map` or `elu_map`.

    Attributes:
        name: key of `MAPS`.
        scale: factor of the logits, as in `kernels.api.attend`.
        projection: [F, D] float32 of all streams or [S, F, D]; random directions (favor), anchors (anchors), or None
            (elu: F = D).
        centre: [S, D] float32 that is taken off every key; q . centre goes into the lse exactly. None for 0.
        log2_offset: [S] float32 added to the lse, for maps that don't estimate exp; None for 0.
    """

    name: str
    scale: float
    projection: Tensor | None = None
    centre: Tensor | None = None
    log2_offset: Tensor | None = None

    def __post_init__(self) -> None:
        """Checks the name and that the map has what it needs."""
        if self.name not in MAPS:
            raise ValueError(f"feature map name={self.name!r}: must be one of {', '.join(MAPS)}")
        if (self.projection is None) != (self.name == "elu"):
            raise ValueError(f"feature map {self.name!r} projection: must be a tensor, or None for elu alone")
        if not self.scale > 0:
            raise ValueError(f"feature map scale={self.scale}: must be above 0")
        check_real("feature map scale", self.scale)

    def features(self, head_dim: int) -> int:
        """F, for keys of D = head_dim."""
        return head_dim if self.projection is None else self.projection.shape[-2]


@dataclass(frozen=True)
class LinearState:
    """What is kept of the tokens of each stream; `add` and `remove` change the tensors in place.

    A sum x of feature f stands for x * 2^log2_scale[f].

    Attributes:
        s: [S, F, D] float32 sum of phi_k(k_i) v_i^T.
        z: [S, F] float32 sum of phi_k(k_i).
        log2_scale: [S, F] float32, the exponent of the feature's largest token since it was empty; -inf while empty.
        peak: [S, F] float32, the largest z since the feature was empty: what the rounding left in z is measured by.
        tokens: [S] int32 tokens held.
    """

    s: Tensor
    z: Tensor
    log2_scale: Tensor
    peak: Tensor
    tokens: Tensor

    def __post_init__(self) -> None:
        """Checks types and shapes."""
        if self.s.dim() != 3:
            raise ValueError(f"linear state s {tuple(self.s.shape)}: must be [S, F, D]")
        shapes = {"s": self.s.shape, **dict.fromkeys(("z", "log2_scale", "peak"), self.s.shape[:2])}
        for key, shape in {**shapes, "tokens": self.s.shape[:1]}.items():
            value, dtype = getattr(self, key), torch.int32 if key == "tokens" else torch.float32
            if value.shape != shape or value.dtype != dtype:
                raise ValueError(
                    f"linear state {key} {value.dtype} {tuple(value.shape)}: must be {dtype} {tuple(shape)}"
                )
            if value.device != self.s.device:
                raise ValueError(f"linear state {key} on {value.device}: must be on s's device, {self.s.device}")

    @property
    def bytes(self) -> int:
        """Bytes all streams take."""
        return sum(x.nbytes for x in (self.s, self.z, self.log2_scale, self.peak, self.tokens))


def check_map(state: LinearState, fmap: FeatureMap, head_dim: int) -> None:
    """Refuses a map that is not of a state's streams, sizes and device.

    Raises:
        ValueError: naming what is wrong and what is allowed.
    """
    streams = len(state.s)
    want = {
        "projection": (streams, state.z.shape[1], head_dim),
        "centre": (streams, head_dim),
        "log2_offset": (streams,),
    }
    for key, shape in want.items():
        value = getattr(fmap, key)
        if value is None:
            continue
        shared = key == "projection" and value.shape == shape[1:]
        if value.shape != shape and not shared:
            raise ValueError(f"feature map {key} {tuple(value.shape)}: must be {shape} for s {tuple(state.s.shape)}")
        check_floats("feature map", **{key: value})
        check_like("feature map", "state", state=state.s, **{key: value})


def empty_state(streams: int, features: int, head_dim: int, device: torch.device | str = "cpu") -> LinearState:
    """The state of streams that hold no token: s [S, F, D] with F = `FeatureMap.features`."""
    z = torch.zeros(streams, features, device=device)
    s = torch.zeros(streams, features, head_dim, device=device)
    tokens = torch.zeros(streams, dtype=torch.int32, device=device)
    return LinearState(s, z, torch.full_like(z, -math.inf), torch.zeros_like(z), tokens)


@torch.no_grad()
def add(state: LinearState, fmap: FeatureMap, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
    """Adds tokens, one or a page or many, in place; work in proportion to their number, not to the tokens held.

    Per feature with exponent e of the largest new token: c = 2^(log2_scale - max(log2_scale, e)), s = s c + sum w v,
    z = z c + sum w, peak = max(peak c, z), w = 2^(exponent - new log2_scale).

    Args:
        state: of S streams.
        fmap: the map the state was begun with.
        k: [S, T, D] float keys.
        v: [S, T, D] float values.
        valid: [S, T] bool, tokens to count; all by default. The others may hold anything.

    Raises:
        ValueError: shapes that don't match.
    """
    exponent, values, count = _tokens(state, fmap, k, v, valid)
    if not k.shape[1]:
        return
    scale = torch.maximum(state.log2_scale, exponent.amax(1))
    safe = torch.where(scale.isinf(), 0.0, scale)
    shrink = torch.exp2(state.log2_scale - safe)
    weight = torch.exp2(exponent - safe[:, None])
    state.s.mul_(shrink[..., None]).baddbmm_(weight.transpose(1, 2), values)
    state.z.mul_(shrink).add_(weight.sum(1))
    state.peak.mul_(shrink).copy_(torch.maximum(state.peak, state.z))
    state.log2_scale.copy_(scale)
    state.tokens.add_(count)


@torch.no_grad()
def remove(state: LinearState, fmap: FeatureMap, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
    """Takes off tokens that were added before, in place.

    Sums are subtracted, so what stays has an absolute error of rounding relative to the largest sum there was. A
    feature left with less than 2^-18 of that (or less than nothing) holds rounding and is emptied, with the little it
    may still have held: denominators never turn negative, and what is left is right within 2^-6 of itself. A stream
    without tokens is exactly empty. Where most of the mass leaves, build the state anew by `add`.

    Arguments and errors are those of `add`; on the host also a ValueError for more tokens than a stream holds, with the
    state left as it was. On a device, where nobody waits for the count, such a stream is emptied and holds 0.
    """
    exponent, values, count = _tokens(state, fmap, k, v, valid)
    if count.device.type == "cpu" and bool((count > state.tokens).any()):
        s = int((count > state.tokens).nonzero()[0, 0])
        most = int(state.tokens[s])
        raise ValueError(
            f"linear remove of {int(count[s])} tokens from stream {s}: must be at most the {most} it holds"
        )
    weight = torch.exp2(exponent - torch.where(state.log2_scale.isinf(), 0.0, state.log2_scale)[:, None])
    state.z.sub_(weight.sum(1))
    state.s.baddbmm_(weight.transpose(1, 2), values, alpha=-1)
    state.tokens.sub_(count).clamp_(min=0)
    gone = (state.z < LOST * state.peak) | (state.tokens <= 0)[:, None]
    state.s.masked_fill_(gone[..., None], 0.0)
    for x, value in ((state.z, 0.0), (state.peak, 0.0), (state.log2_scale, -math.inf)):
        x.masked_fill_(gone, value)


@torch.no_grad()
def merge_states(one: LinearState, other: LinearState) -> LinearState:
    """The state of the tokens of both; each must have been begun with the same map. Neither is changed."""
    if one.s.shape != other.s.shape:
        raise ValueError(f"states {tuple(one.s.shape)} and {tuple(other.s.shape)}: must be of one shape")
    scale = torch.maximum(one.log2_scale, other.log2_scale)
    safe = torch.where(scale.isinf(), 0.0, scale)
    a, b = torch.exp2(one.log2_scale - safe), torch.exp2(other.log2_scale - safe)
    s = one.s * a[..., None] + other.s * b[..., None]
    z = one.z * a + other.z * b
    return LinearState(s, z, scale, one.peak * a + other.peak * b, one.tokens + other.tokens)


def attend(q: Tensor, state: LinearState, fmap: FeatureMap) -> Partial:
    """Attention over all tokens a state holds, to be merged with pages by `kernels.mixture`.

    There is no mask: rows of an extend block see every token held, so add the block's own tokens after it.

    Args:
        q: [S, G, T, D] fp32, bf16 or fp16.
        state: of S streams.
        fmap: the map the state was begun with.

    Returns:
        `Partial`; lse = log2 of the denominator; out 0 and lse -inf for a stream that holds nothing. A NaN in a query
        makes that row NaN and no other.

    Raises:
        ValueError: shapes that don't match.
    """
    if q.dim() != 4:
        raise ValueError(f"linear attention of q {tuple(q.shape)}: must be [S, G, T, D]")
    streams, group, tokens, head_dim = q.shape
    if streams != len(state.s) or head_dim != state.s.shape[2] or state.z.shape[1] != fmap.features(head_dim):
        raise ValueError(
            f"linear attention of q {tuple(q.shape)} over s {tuple(state.s.shape)}: must be [S, G, T, D] over "
            f"[S, {fmap.features(head_dim)}, D]"
        )
    check_floats("linear attention of", q=q)
    check_like("linear attention of", "q", q=q, state=state.s)
    check_map(state, fmap, head_dim)
    exponent, offset = query_exponents(fmap, q.reshape(streams, group * tokens, head_dim).float())
    logit = exponent + state.log2_scale[:, None]
    top = logit.amax(2, keepdim=True)
    weight = torch.exp2(logit - torch.where(top.isinf(), 0.0, top))
    total = weight @ state.z[..., None]
    out = torch.where(total == 0, 0.0, weight @ state.s / total)
    lse = (top + total.log2())[..., 0] + offset
    return Partial(out.view(*q.shape[:3], -1), lse.view(q.shape[:3]))


def reference(q: Tensor, k: Tensor, v: Tensor, fmap: FeatureMap, valid: Tensor | None = None) -> Partial:
    """What `attend` should give, in float64 and without a state: every token weighed by phi_q(q) . phi_k(k).

    q [S, G, T, D]; k, v [S, n, D]; valid [S, n] bool.
    """
    streams, group, tokens, head_dim = q.shape
    exponent, offset = query_exponents(fmap, q.reshape(streams, group * tokens, head_dim).double())
    keys = key_exponents(fmap, k.double())
    logit = torch.logsumexp((exponent[:, :, None] + keys[:, None]) * math.log(2), 3) * LOG2_E + offset[..., None]
    values = v.double()
    if valid is not None:
        logit = torch.where(valid[:, None], logit, -math.inf)
        values = torch.where(valid[..., None], values, 0.0)
    lse = torch.logsumexp(logit * math.log(2), 2) * LOG2_E
    weight = torch.exp2(logit - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return Partial((weight @ values).view(*q.shape[:3], -1), lse.view(q.shape[:3]))


def _tokens(
    state: LinearState, fmap: FeatureMap, k: Tensor, v: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents [S, T, F] (-inf for a token that does not count), values [S, T, D] and tokens that count [S]."""
    fits = (
        k.dim() == v.dim() == 3
        and k.shape[:2] == v.shape[:2]
        and len(k) == len(state.s)
        and v.shape[2] == state.s.shape[2]
    )
    if not fits or (valid is not None and valid.shape != k.shape[:2]):
        raise ValueError(
            f"linear state {tuple(state.s.shape)} with k {tuple(k.shape)}, v {tuple(v.shape)}: must be [S, T, D], "
            f"valid [S, T], S and D the state's"
        )
    if state.z.shape[1] != fmap.features(k.shape[2]):
        raise ValueError(f"linear state of F={state.z.shape[1]}: must be the map's {fmap.features(k.shape[2])}")
    check_floats("linear state with", k=k, v=v)
    check_like("linear state with", "k", k=k, v=v, state=state.s, **({} if valid is None else {"valid": valid}))
    check_map(state, fmap, k.shape[2])
    exponent, values = key_exponents(fmap, k.float()), v.float()
    if valid is None:
        return exponent, values, torch.full_like(state.tokens, k.shape[1])
    exponent = torch.where(valid[..., None], exponent, -math.inf)
    return exponent, torch.where(valid[..., None], values, 0.0), valid.sum(1, dtype=torch.int32)


def query_exponents(fmap: FeatureMap, q: Tensor) -> tuple[Tensor, Tensor]:
    """Log2 of phi_q: per feature [S, R, F], and what all features of a row share [S, R]; q [S, R, D], float."""
    exponent, offset = MAPS[fmap.name][0](fmap, q)
    if fmap.centre is not None:
        offset = offset + (q @ fmap.centre.to(q.dtype)[..., None])[..., 0] * (fmap.scale * LOG2_E)
    if fmap.log2_offset is not None:
        offset = offset + fmap.log2_offset.to(q.dtype)[:, None]
    return exponent, offset


def key_exponents(fmap: FeatureMap, k: Tensor) -> Tensor:
    """Log2 of phi_k [S, T, F]; k [S, T, D], float."""
    if fmap.centre is not None:
        k = k - fmap.centre.to(k.dtype)[:, None]
    return MAPS[fmap.name][1](fmap, k)


def _project(fmap: FeatureMap, x: Tensor) -> Tensor:
    """X [S, R, D] -> [S, R, F]."""
    if fmap.projection is None:
        raise ValueError(f"feature map {fmap.name!r} has no projection")
    return x @ fmap.projection.to(x.dtype).transpose(-2, -1)


def _favor_query(fmap: FeatureMap, q: Tensor) -> tuple[Tensor, Tensor]:
    x = q * math.sqrt(fmap.scale)
    exponent = _project(fmap, x) * LOG2_E
    return exponent, -x.square().sum(2) * (LOG2_E / 2) - math.log2(exponent.shape[2])


def _favor_key(fmap: FeatureMap, k: Tensor) -> Tensor:
    x = k * math.sqrt(fmap.scale)
    return (_project(fmap, x) - x.square().sum(2, keepdim=True) / 2) * LOG2_E


def _anchor_query(fmap: FeatureMap, q: Tensor) -> tuple[Tensor, Tensor]:
    exponent = _project(fmap, q) * (fmap.scale * LOG2_E)
    return exponent, exponent.new_zeros(exponent.shape[:2])


def _anchor_key(fmap: FeatureMap, k: Tensor) -> Tensor:
    if fmap.projection is None:
        raise ValueError("feature map 'anchors' has no projection")
    square = fmap.projection.to(k.dtype).square().sum(-1)
    near = (2 * _project(fmap, k) - square.unsqueeze(-2)) * fmap.scale
    return torch.log_softmax(near, 2) * LOG2_E


def _elu_query(fmap: FeatureMap, q: Tensor) -> tuple[Tensor, Tensor]:
    exponent = _elu_key(fmap, q)
    return exponent, exponent.new_zeros(exponent.shape[:2])


def _elu_key(fmap: FeatureMap, k: Tensor) -> Tensor:
    x = k * math.sqrt(fmap.scale)
    return torch.where(x > 0, torch.log2(1 + x.clamp(min=0)), x * LOG2_E)


MAPS = MappingProxyType(
    {"favor": (_favor_query, _favor_key), "anchors": (_anchor_query, _anchor_key), "elu": (_elu_query, _elu_key)}
)


def favor_map(
    head_dim: int, features: int, scale: float, *, seed: int, centre: Tensor | None = None, device: str = "cpu"
) -> FeatureMap:
    """Positive orthogonal random features, FAVOR+ (Choromanski et al. 2021, arXiv 2009.14794): unbiased for exp.

    phi(x) = exp(w . x - |x|^2 / 2) / sqrt(F) with x = sqrt(scale) k. The variance grows with exp(|q + k|^2), so take
    the keys' mean off (`centre`), which costs nothing.

    Args:
        head_dim: D.
        features: F.
        scale: factor of the logits.
        seed: of the directions.
        centre: [S, D], see `FeatureMap`.
        device: of the projection.
    """
    check_int("favor_map head_dim", head_dim, 1)
    check_int("favor_map features", features, 1)
    rng = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, features, head_dim):
        gauss = torch.randn(head_dim, head_dim, generator=rng, dtype=torch.float64)
        norms = torch.randn(head_dim, head_dim, generator=rng, dtype=torch.float64).norm(dim=1)
        blocks.append((torch.linalg.qr(gauss)[0].T * norms[:, None])[: features - start])
    projection = torch.cat(blocks).float().to(device)
    return FeatureMap("favor", scale, projection, centre)


def elu_map(scale: float, log2_offset: Tensor | None = None) -> FeatureMap:
    """elu(x) + 1 of x = sqrt(scale) k (Katharopoulos et al. 2020, arXiv 2006.16236), F = D.

    Not an estimate of exp: on its own a normalised attention, but its denominator is on another scale than a
    softmax's, so before it is merged with pages give it an offset (`fit_offset`).
    """
    return FeatureMap("elu", scale, log2_offset=log2_offset)


def anchor_map(k: Tensor, features: int, scale: float, valid: Tensor | None = None) -> FeatureMap:
    """Anchors a stream: phi_q = exp(scale q . a_f), phi_k = softmax_f(-scale |k - a_f|^2). Ours.

    A key counts as the anchors it is near to, so with an anchor on every key nothing is lost. The anchors are the means
    of k-means groups of sample keys (at most 1,024, evenly spaced) and stay fixed, so later keys that are unlike all of
    them are weighed wrongly.

    Args:
        k: [S, n, D] sample keys.
        features: F.
        scale: factor of the logits.
        valid: [S, n] bool, keys to look at; all by default.
    """
    step = -(-k.shape[1] // ANCHOR_TOKENS) or 1
    sample = k[:, ::step]
    anchors, _, _ = make_prototypes(
        sample, sample, features, None if valid is None else valid[:, ::step], method="kmeans"
    )
    return FeatureMap("anchors", scale, anchors)


def fit_offset(
    fmap: FeatureMap, state: LinearState, q: Tensor, lse: Tensor, weight: Tensor | None = None
) -> FeatureMap:
    """The map with the log2_offset that makes its lse right on average over sample queries.

    Args:
        fmap: the state's map.
        state: of S streams.
        q: [S, G, T, D] sample queries.
        lse: [S, G, T] base-2 log-sum-exp of exact attention over the tokens the state holds.
        weight: [S, G, T] of each query, such as the share of the state's mass; 1 by default.

    Returns:
        the same map with log2_offset [S]; unchanged for a stream that holds nothing.
    """
    missing = lse.float() - attend(q, state, fmap).lse
    counted = torch.isfinite(missing).float() * (1.0 if weight is None else weight)
    total = torch.where(counted > 0, missing, 0.0).mul(counted).sum((1, 2))
    fresh = total / counted.sum((1, 2)).clamp(min=torch.finfo(total.dtype).tiny)
    return replace(fmap, log2_offset=fresh if fmap.log2_offset is None else fmap.log2_offset + fresh)
