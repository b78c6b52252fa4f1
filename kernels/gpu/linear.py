"""New tokens into linear-attention states in one launch, as `kernels.linear_attention.add`: O(1) work a token.

A program takes a block of one stream's features, keeps its part of the state in registers, and adds the tokens one by
one: per feature with exponent e, c = 2^(scale - max(scale, e)), s = s c + w v, z = z c + w, w = 2^(e - new scale).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import launch, power_of_2
from kernels.gpu.spec import Spec, Variant
from kernels.linear_attention import FeatureMap, LinearState

FAVOR, ANCHORS, ELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MAP_IDS = {"favor": 0, "anchors": 1, "elu": 2}
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_block(projection, f, F: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Directions or anchors f of a stream, [features, >= D] float32."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(projection + f[:, None] * D + d, mask=(f < F)[:, None] & (d < D), other=0.0)


@triton.jit
def nearness(block, x, scale, f, F: tl.constexpr):
    """Base-2 logits of a key among anchors, -inf for none."""
    near = (2 * tl.sum(block * x[None, :], 1) - tl.sum(block * block, 1)) * (scale * LOG2_E)
    return tl.where(f < F, near, float("-inf"))


@triton.jit
def log2_total(projection, x, scale, F: tl.constexpr, D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr):
    """Log2 of the sum over all anchors of 2^nearness."""
    top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        near = nearness(load_block(projection, f, F, D, BLOCK_D), x, scale, f, F)
        higher = tl.maximum(top, tl.max(near, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(near - higher), 0)
        top = higher
    return top + tl.log2(total)


@triton.jit(do_not_specialize=["tokens"])
def add_kernel(
    k,
    v,
    k_stream,
    k_token,
    k_channel,
    v_stream,
    v_token,
    v_channel,
    valid,
    tokens,
    projection,
    projection_stream,
    centre,
    scale,
    s,
    z,
    log2_scale,
    peak,
    held,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
    CENTRED: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (stream, b): features b * BLOCK_F on; at most RUN tokens."""
    stream = tl.program_id(0).to(tl.int64)
    f, d = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_D)
    real, inside = f < F, d < D
    at = stream * F + f
    state = s + at[:, None] * D + d[None, :]
    both = real[:, None] & inside[None, :]
    sums = tl.load(state, mask=both, other=0.0)
    weights, most = tl.load(z + at, mask=real, other=0.0), tl.load(peak + at, mask=real, other=0.0)
    exponent = tl.load(log2_scale + at, mask=real, other=float("-inf"))
    if MAP != ELU:
        directions = projection + stream * projection_stream
        block = load_block(directions, f, F, D, BLOCK_D)
    root = tl.sqrt(scale)
    added = 0
    key, value_at = k + stream * k_stream, v + stream * v_stream + d * v_channel
    for t in range(0, RUN):
        counts = t < tokens
        if MASKED:
            counts = counts & (tl.load(valid + stream * tokens + t, mask=counts, other=0) != 0)
        # A block's mask joined with a scalar's is no mask to the interpreter of Triton 3.9.
        counted = d < tl.where(counts, D, 0)
        value = tl.load(value_at, mask=counted, other=0.0)
        if MAP == ELU:
            x = tl.load(key + f * k_channel, mask=f < tl.where(counts, F, 0), other=0.0).to(tl.float32)
            if CENTRED:
                x -= tl.load(centre + stream * D + f, mask=real, other=0.0)
            x = x * root
            e = tl.where(x > 0, tl.log2(1 + tl.maximum(x, 0.0)), x * LOG2_E)
        else:
            x = tl.load(key + d * k_channel, mask=counted, other=0.0).to(tl.float32)
            if CENTRED:
                x -= tl.load(centre + stream * D + d, mask=inside, other=0.0)
            if MAP == FAVOR:
                x = x * root
                e = (tl.sum(block * x[None, :], 1) - tl.sum(x * x, 0) / 2) * LOG2_E  # pyright: ignore[reportUnboundVariable]
            else:
                e = nearness(block, x, scale, f, F) - log2_total(directions, x, scale, F, D, BLOCK_F, BLOCK_D)  # pyright: ignore[reportUnboundVariable]
        e = tl.where(counts, e, float("-inf"))
        larger = tl.maximum(exponent, e)
        # -inf minus -inf is NaN: a feature that has held nothing yet is held against 0.
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        shrink, weight = tl.exp2(exponent - safe), tl.exp2(e - safe)
        sums = sums * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
        weights = weights * shrink + weight
        most = tl.maximum(most * shrink, weights)
        exponent = larger
        added += counts.to(tl.int32)
        key += k_token
        value_at += v_token
    tl.store(state, sums, mask=both)
    tl.store(z + at, weights, mask=real)
    tl.store(peak + at, most, mask=real)
    tl.store(log2_scale + at, exponent, mask=real)
    if tl.program_id(1) == 0:
        tl.store(held + stream, tl.load(held + stream) + added)


def add(state: LinearState, fmap: FeatureMap, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
    """As `kernels.linear_attention.add`, in place, in one launch that waits for nothing.

    Args:
        state: of S streams, its tensors contiguous.
        fmap: the map the state was begun with.
        k: [S, T, D] float keys, of any strides.
        v: [S, T, D] float values, of any strides.
        valid: [S, T] bool, tokens to count; all by default.

    Raises:
        ValueError: shapes that don't match, a state that is not contiguous.
    """
    streams, features, head_dim = state.s.shape
    tokens = k.shape[1]
    if k.shape != v.shape or k.shape != (streams, tokens, head_dim) or fmap.features(head_dim) != features:
        raise ValueError(f"linear state {tuple(state.s.shape)} with k {tuple(k.shape)}, v {tuple(v.shape)}: must match")
    parts = {"s": state.s, "z": state.z, "log2_scale": state.log2_scale, "peak": state.peak, "tokens": state.tokens}
    for name, x in parts.items():
        if not x.is_contiguous():
            raise ValueError(f"linear state {name} strides {x.stride()}: must be contiguous")
    if not streams or not tokens:
        return
    projection = None if fmap.projection is None else fmap.projection.float().contiguous()
    blocks = _blocks(features, head_dim)
    launch(
        add_kernel,
        (streams, -(-features // blocks["BLOCK_F"])),
        k.device,
        k,
        v,
        *k.stride(),
        *v.stride(),
        None if valid is None else valid.contiguous(),
        tokens,
        projection,
        features * head_dim if projection is not None and projection.dim() == 3 else 0,
        None if fmap.centre is None else fmap.centre.float().contiguous(),
        float(fmap.scale),
        *parts.values(),
        MAP=MAP_IDS[fmap.name],
        MASKED=valid is not None,
        CENTRED=fmap.centre is not None,
        RUN=power_of_2(tokens),
        **blocks,
        num_warps=4,
    )


def _blocks(features: int, head_dim: int) -> dict[str, int]:
    """Sizes, and tile sides that leave 32 elements of the state a thread."""
    block = power_of_2(head_dim)
    return {"F": features, "D": head_dim, "BLOCK_F": min(power_of_2(features), max(1, 4096 // block)), "BLOCK_D": block}


def _variant(name: str, features: int, head_dim: int) -> Variant:
    constants = {"k_channel": 1, "v_channel": 1, "valid": None, "MAP": MAP_IDS[name], "MASKED": False}
    constants |= {"CENTRED": name != "elu", "RUN": 1, **_blocks(features, head_dim)}
    if name == "elu":
        constants |= {"projection": None, "centre": None}
    types = dict.fromkeys(("projection", "centre", "s", "z", "log2_scale", "peak"), "*fp32")
    types |= {"k": "*bf16", "v": "*bf16", "held": "*i32", "scale": "fp32"}
    signature = {key: "constexpr" if key in constants else types.get(key, "i32") for key in add_kernel.arg_names}
    divisible = {"k", "v", "k_stream", "v_stream", "projection", "projection_stream", "s", "z"} - set(constants)
    return Variant(f"{name}-f{features}-d{head_dim}", signature, constants, frozenset(divisible))


SPEC = Spec("linear", add_kernel, (_variant("favor", 128, 128), _variant("anchors", 64, 64), _variant("elu", 128, 128)))
