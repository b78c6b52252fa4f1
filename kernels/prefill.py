"""Attention of a chunk of new queries over a contiguous cache, and the softmax mass it puts on each page.

The past is attended without a mask by torch's flash kernel, which returns the log-sum-exp, with the G query heads
of a KV head packed as rows; the chunk itself causally; both are joined by their log-sum-exp. K and V are never
repeated and no [T, Tk] matrix is held for all heads at once. Windows, ALiBi and what the flash kernel does not
serve take blocks of keys.

    out, lse = chunk_attention(q, k, v, scale=D**-0.5)                    # the T queries are the newest of Tk keys
    mean, most = page_mass(q[:, -32:], lse[:, -32:], k, page_tokens=16, scale=D**-0.5)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.guards import check_floats, check_int, check_like, check_real

LOG2E = 1 / math.log(2)
BLOCK_ELEMENTS = 4 << 20  # logits held at once by the blocked paths


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window_tokens: int = 0, slopes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of T queries that are the newest T of Tk positions.

    Args:
        q: [Hq, T, D] float.
        k: [Hk, Tk, D], Tk >= T.
        v: [Hk, Tk, D].
        scale: factor of the logits.
        window_tokens: keys each row sees at most, itself included; 0 for no limit.
        slopes: [Hq] float, ALiBi: logit += slope * key position.

    Returns:
        out [Hq, T, D] of q's dtype, lse [Hq, T] float32 in base 2.

    Raises:
        ValueError: shapes, types or devices that don't match, a negative window.
    """
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and k.shape[2] == q.shape[2] and len(k) > 0
    if not fits or len(q) % len(k) or not 0 < q.shape[1] <= k.shape[1]:
        raise ValueError(
            f"chunk q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: must be [Hq, T, D], [Hk, Tk, D] "
            "twice, with Hk > 0, Hq a multiple of Hk and 0 < T <= Tk"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"chunk q {q.dtype}, k {k.dtype}, v {v.dtype}: must be of one type")
    _check("chunk", q, scale, window_tokens, slopes, k=k, v=v)
    (query_heads, tokens, head_dim), (kv_heads, length, _) = q.shape, k.shape
    if (window_tokens and window_tokens < length) or slopes is not None or not _flash_serves(q):
        return _blocked(q, k, v, scale, window_tokens, slopes)
    group, past = query_heads // kv_heads, length - tokens
    own = q.reshape(kv_heads, group, tokens, head_dim)
    # A batch of KV heads, each with its G heads: the keys are shared by a stride of 0.
    new_k, new_v = (x[:, None, past:].expand(-1, group, -1, -1) for x in (k, v))
    out, lse = _flash(own, new_k, new_v, True, scale)
    if past:
        rows = q.reshape(1, kv_heads, group * tokens, head_dim)
        past_out, past_lse = _flash(rows, k[None, :, :past], v[None, :, :past], False, scale)
        past_out, past_lse = past_out.view(own.shape), past_lse.view(lse.shape)
        total = torch.logaddexp2(lse, past_lse)
        out = torch.lerp(past_out.float(), out.float(), torch.exp2(lse - total)[..., None])
        lse = total
    return out.to(q.dtype).reshape(q.shape), lse.reshape(query_heads, tokens)


def page_mass(
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    page_tokens: int,
    scale: float,
    window_tokens: int = 0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax mass on each page, summed over the T rows (SnapKV's and H2O's raw signal).

    Args:
        q: [Hq, T, D], the newest T positions' queries.
        lse: [Hq, T], base 2, as `chunk_attention` returned it.
        k: [Hk, Tk, D].
        page_tokens: P; the last page may be short.
        scale: factor of the logits.
        window_tokens: as in `chunk_attention`.
        slopes: as in `chunk_attention`.

    Returns:
        mean and maximum over the G query heads of each KV head: [Hk, N] float32 each, N = ceil(Tk / P).

    Raises:
        ValueError: shapes, types or devices that don't match, a negative window, P < 1.
    """
    fits = q.dim() == k.dim() == 3 and len(k) > 0 and len(q) % len(k) == 0 and q.shape[2] == k.shape[2]
    if not fits or lse.shape != q.shape[:2] or not q.shape[1] <= k.shape[1]:
        raise ValueError(
            f"page_mass q {tuple(q.shape)}, lse {tuple(lse.shape)}, k {tuple(k.shape)}: must be [Hq, T, D], [Hq, T], "
            "[Hk, Tk, D], with Hk > 0, Hq a multiple of Hk and T <= Tk"
        )
    check_int("page_mass page_tokens", page_tokens, 1)
    _check("page_mass", q, scale, window_tokens, slopes, lse=lse, k=k)
    kv_heads, length, _ = k.shape
    group, tokens = q.shape[0] // kv_heads, q.shape[1]
    pages = -(-length // page_tokens)
    mass = torch.zeros(kv_heads, group, pages, device=q.device)
    lse = (lse - _alibi_shift(q, length, slopes)).float().reshape(kv_heads, group * tokens, 1)
    for start, end, logit in _logit_blocks(q, k, scale, window_tokens, slopes, page_tokens):
        weight = torch.exp2(logit - lse).view(kv_heads, group, tokens, end - start).sum(2)
        short = -(end - start) % page_tokens
        weight = torch.nn.functional.pad(weight, (0, short)).unflatten(2, (-1, page_tokens)).sum(3)
        mass[:, :, start // page_tokens : start // page_tokens + weight.shape[2]] += weight
    return mass.mean(1), mass.amax(1)


def _check(what: str, q: Tensor, scale: float, window_tokens: int, slopes: Tensor | None, **others: Tensor) -> None:
    """Refuses what both functions refuse."""
    if slopes is not None:
        if slopes.shape != q.shape[:1]:
            raise ValueError(f"{what} slopes {tuple(slopes.shape)}: must be [Hq] = {tuple(q.shape[:1])}")
        others["slopes"] = slopes
    check_floats(what, q=q, **others)
    check_like(what, "q", q=q, **others)
    check_real(f"{what} scale", scale)
    check_int(f"{what} window_tokens", window_tokens, 0, meaning=" (no limit)")


def _flash_serves(q: Tensor) -> bool:
    """Whether a torch kernel that returns the log-sum-exp takes these queries."""
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and half and q.shape[2] % 8 == 0 and q.shape[2] <= 256


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's flash attention of the device: q [B, H, T, D]; lse [B, H, T] in base 2."""
    if q.device.type == "cpu":
        if q.dtype != torch.float32 and not _half_is_fast():
            q, k, v = q.float(), k.float(), v.float()
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    return out, lse.float() * LOG2E


def _half_is_fast() -> bool:
    """Whether this CPU multiplies bf16 itself; elsewhere torch's half-precision products are far slower."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def _logit_blocks(
    q: Tensor, k: Tensor, scale: float, window_tokens: int, slopes: Tensor | None, multiple: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Base-2 logits [Hk, G * T, end - start] of blocks of keys, -inf where hidden; starts are multiples.

    ALiBi counts from the row's own position, so that logits stay small: `_alibi_shift` is what lse lacks.
    """
    kv_heads, length, head_dim = k.shape
    group, tokens = q.shape[0] // kv_heads, q.shape[1]
    rows = (q.float() * (scale * LOG2E)).reshape(kv_heads, group * tokens, head_dim)
    own = torch.arange(length - tokens, length, device=q.device)
    step = max(1, BLOCK_ELEMENTS // (kv_heads * group * tokens) // multiple) * multiple
    first = max(0, length - tokens - window_tokens + 1) // multiple * multiple if window_tokens else 0
    for start in range(first, length, step):
        end = min(start + step, length)
        logit = rows @ k[:, start:end].float().transpose(1, 2)
        position = torch.arange(start, end, device=q.device)
        shaped = logit.view(kv_heads, group, tokens, end - start)
        if slopes is not None:
            shaped += (slopes.float() * LOG2E).view(kv_heads, group, 1, 1) * (position - own[:, None])
        if end > length - tokens + 1 or window_tokens:
            hidden = position > own[:, None]
            if window_tokens:
                hidden |= position <= own[:, None] - window_tokens
            shaped.masked_fill_(hidden, -math.inf)
        yield start, end, logit


def _alibi_shift(q: Tensor, length: int, slopes: Tensor | None) -> Tensor | float:
    """Base-2 logits [Hq, T] float64 of ALiBi at the rows' own positions."""
    if slopes is None:
        return 0.0
    return slopes.double()[:, None] * LOG2E * torch.arange(length - q.shape[1], length, device=q.device)


def _blocked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window_tokens: int, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Flash attention in plain torch: blocks of keys, a running maximum and sum."""
    kv_heads = k.shape[0]
    rows = q.shape[0] // kv_heads * q.shape[1]
    out = torch.zeros(kv_heads, rows, q.shape[2], device=q.device)
    top = torch.full((kv_heads, rows, 1), -math.inf, device=q.device)
    total = torch.zeros_like(top)
    for start, end, logit in _logit_blocks(q, k, scale, window_tokens, slopes, 1):
        higher = torch.maximum(top, logit.amax(2, keepdim=True))
        base = torch.where(higher.isinf(), 0.0, higher)  # -inf minus -inf is NaN
        shrink = torch.exp2(top - base)
        weight = torch.exp2(logit - base)
        total = total * shrink + weight.sum(2, keepdim=True)
        out = out * shrink + weight @ v[:, start:end].float()
        top = higher
    lse = (top + total.log2()).view(q.shape[:2]) + _alibi_shift(q, k.shape[1], slopes)
    return (out / total).view(q.shape).to(q.dtype), lse.float()
