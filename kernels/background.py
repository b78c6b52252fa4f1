"""One key and one value that stand for everything a stream skips.

The skipped keys have a log-sum-exp l(q) and an output o(q). A background state answers with q . k * scale / ln 2 +
log2_count and with v, so it is a "proto" page with one group and costs no kernel. `fit_background` chooses the three
so that the joint softmax of the kept keys and the state comes close to that of all keys, on sample queries (recent
ones: the next will be like them). Method ours; the plain mean is the single prototype of `kernels.prototypes`.

Relative error of the output on later queries, SmolLM2-135M, 90 streams, 1,776 of 2,048 tokens skipped, fitted on 192
queries (64 positions x 3 heads), mean over streams: skipped .268, plain mean .268, closed .221, gradient .187 (on the
queries fitted on: .190, .115, .087). A Gaussian correction of the logit, scale^2 / 2 q^T Cov(k) q, is worse than none
(real keys have heavy tails), so closed form means least squares.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.guards import check_floats, check_int, check_real

LOG2_E = math.log2(math.e)
# Ridge towards the mean key, as a share of the queries' mean square; the best of 1e-3 to 10 on the data above.
RIDGE = 0.1
STEPS = 200
LEARNING_RATE = 0.02
# The gradient is taken on three of four queries and the best step chosen on the fourth.
CHECK_EVERY = 4
BLOCK_LOGITS = 1 << 24
METHODS = ("mean", "closed", "gradient")


def fit_background(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    method: str = "closed",
    valid: Tensor | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    steps: int = STEPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """The background state of each stream.

    Methods:
        mean: mean key, mean value, log2 of the number of tokens; q is not looked at.
        closed: k and log2_count by least squares of the true log-sum-exp on the queries (affine in q, with a ridge
            towards the mean key); v is the mean over the queries of the skipped output, weighed by the skipped mass.
        gradient: Adam on the squared relative error of the mixture with `kept`, from the closed form; three of four
            queries train, and of all steps (the first included) the one is returned that is best on the others. So it
            is never worse than the closed form on those. Deterministic.

    Args:
        q: [S, M, D] sample queries, of all the heads that share the stream; M >= 1 (8 for "gradient").
        k: [S, n, D] keys that are skipped.
        v: [S, n, D] their values.
        scale: factor of the logits.
        method: "mean", "closed" or "gradient".
        valid: [S, n] bool, tokens that are skipped; all by default. The others may hold anything.
        kept: out [S, M, D] and base-2 lse [S, M] of the same queries over what is not skipped. Without it "closed"
            takes the skipped mass as everything; "gradient" needs it.
        steps: of "gradient".

    Returns:
        k [S, 1, D], v [S, 1, D], log2_count [S, 1], float32, for `kernels.prototypes.encode_prototypes`; zeros and
        -inf for a stream that skips nothing.

    Raises:
        ValueError: shapes or types that don't match, an unknown method, steps < 0, "gradient" without `kept`, too few
            queries.
    """
    _check(q, k, v, method, valid, kept)
    check_int("background steps", steps, 0)
    check_real("background scale", scale)
    # Tensors made in inference mode can't take part in a gradient, so everything is made anew outside it.
    with torch.inference_mode(False), torch.no_grad():
        queries = q.to(torch.float32, copy=True)
        kept = None if kept is None else (kept[0].to(torch.float32, copy=True), kept[1].to(torch.float32, copy=True))
        if valid is None:
            valid = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        keys, values = (torch.where(valid[..., None], x.float(), 0.0) for x in (k, v))
        count = valid.sum(1)
        held = count.clamp(min=1)[:, None]
        state = keys.sum(1) / held, values.sum(1) / held, count.float().log2()
        if method != "mean":
            skipped = _attend(queries, keys, values, valid, scale)
            state = _closed(queries, state[0], skipped, scale, kept)
            if method == "gradient" and kept is not None:
                state = _descend(queries, state, skipped, scale, kept, steps)
        empty = count == 0
        k_out, v_out = (x.masked_fill(empty[:, None], 0.0)[:, None] for x in state[:2])
        return k_out, v_out, state[2].masked_fill(empty, -math.inf)[:, None]


def background_error(
    q: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    skipped: tuple[Tensor, Tensor],
    scale: float,
    kept: tuple[Tensor, Tensor],
) -> Tensor:
    """Relative error |out' - out| / |out| of the mixture [S, M] with the state in place of what it stands for.

    q [S, M, D]; state as `fit_background` returns it; skipped and kept: out [S, M, D] and base-2 lse [S, M].
    """
    k, v, log2_count = state[0][:, 0], state[1][:, 0], state[2][:, 0]
    truth = _mix(kept, skipped[0], skipped[1])
    got = _mix(kept, v[:, None], _lse(q.float(), k, log2_count, scale))
    return (got - truth).norm(dim=2) / truth.norm(dim=2)


def _check(
    q: Tensor, k: Tensor, v: Tensor, method: str, valid: Tensor | None, kept: tuple[Tensor, Tensor] | None
) -> None:
    if method not in METHODS:
        raise ValueError(f"background method={method!r}: must be one of {', '.join(METHODS)}")
    fits = q.dim() == k.dim() == 3 and k.shape == v.shape and len(q) == len(k) and q.shape[2] == k.shape[2]
    if not fits or (valid is not None and valid.shape != k.shape[:2]):
        raise ValueError(
            f"background q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: must be [S, M, D], [S, n, D], "
            f"[S, n, D], valid [S, n]"
        )
    check_floats("background", q=q, k=k, v=v)
    if kept is not None and (kept[0].shape != q.shape or kept[1].shape != q.shape[:2]):
        raise ValueError(f"background kept {tuple(kept[0].shape)}, {tuple(kept[1].shape)}: must be [S, M, D], [S, M]")
    if method == "gradient" and kept is None:
        raise ValueError("background kept=None: method 'gradient' needs out and lse of what is not skipped")
    least = {"mean": 0, "closed": 1, "gradient": 2 * CHECK_EVERY}[method]
    if q.shape[1] < least:
        raise ValueError(f"background of {q.shape[1]} queries: method {method!r} needs at least {least}")


def _attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out [S, M, D] and base-2 lse [S, M]; 0 and -inf for a stream with no valid key. A few streams at a time."""
    some = max(1, BLOCK_LOGITS // max(q.shape[1] * k.shape[1], 1))
    if some < len(q):
        cuts = [slice(s, s + some) for s in range(0, len(q), some)]
        out, lse = zip(*(_attend(q[c], k[c], v[c], valid[c], scale) for c in cuts), strict=True)
        return torch.cat(out), torch.cat(lse)
    logit = torch.where(valid[:, None], q @ k.transpose(1, 2) * (scale * LOG2_E), -math.inf)
    top = logit.amax(2, keepdim=True) if k.shape[1] else logit.new_full((*q.shape[:2], 1), -math.inf)
    weight = torch.exp2(logit - torch.where(top.isinf(), 0.0, top))
    total = weight.sum(2, keepdim=True)
    return weight @ v / total.clamp(min=torch.finfo(total.dtype).tiny), (top + total.log2())[..., 0]


def _lse(q: Tensor, k: Tensor, log2_count: Tensor, scale: float) -> Tensor:
    """Base-2 logit [S, M] of a state k [S, D], log2_count [S]."""
    return (q @ k[..., None])[..., 0] * (scale * LOG2_E) + log2_count[:, None]


def _mix(kept: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> Tensor:
    """Output [S, M, D] of what is kept and of something else with its lse."""
    return kept[0] + torch.sigmoid((lse - kept[1]) / LOG2_E)[..., None] * (out - kept[0])


def _closed(
    q: Tensor, mean_k: Tensor, skipped: tuple[Tensor, Tensor], scale: float, kept: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fit_background`; k [S, D], v [S, D], log2_count [S]."""
    out, lse = skipped
    share = torch.ones_like(lse) if kept is None else torch.sigmoid((lse - kept[1]) / LOG2_E)
    v = (share[..., None] * out).sum(1) / share.sum(1).clamp(min=torch.finfo(share.dtype).tiny)[:, None]
    finite = torch.where(lse.isinf(), 0.0, lse)
    x = torch.cat((q * (scale * LOG2_E), torch.ones_like(lse)[..., None]), 2).double()
    y = (finite - (q @ mean_k[..., None])[..., 0] * (scale * LOG2_E)).double()
    normal = x.transpose(1, 2) @ x
    diagonal = normal.diagonal(dim1=1, dim2=2)
    # The least addend keeps the system regular when all queries are 0.
    diagonal[:, :-1] += RIDGE * diagonal[:, :-1].mean(1, keepdim=True) + 1e-12
    solved = torch.linalg.solve(normal, x.transpose(1, 2) @ y[..., None])[..., 0].float()
    return mean_k + solved[:, :-1], v, solved[:, -1]


def _descend(
    q: Tensor,
    start: tuple[Tensor, Tensor, Tensor],
    skipped: tuple[Tensor, Tensor],
    scale: float,
    kept: tuple[Tensor, Tensor],
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fit_background`; all streams at once, since the loss is a sum over streams and Adam works by element."""
    truth = _mix(kept, *skipped)
    weight = 1 / truth.square().sum(2).clamp(min=torch.finfo(truth.dtype).tiny)
    checked = torch.arange(q.shape[1], device=q.device) % CHECK_EVERY == CHECK_EVERY - 1
    train, check = (~checked).nonzero()[:, 0], checked.nonzero()[:, 0]
    # In units of their own size, so that one learning rate serves keys, values and the offset.
    unit = [x.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6) for x in start[:2]]

    def error(state: list[Tensor], rows: Tensor) -> Tensor:
        k, v = start[0] + state[0] * unit[0], start[1] + state[1] * unit[1]
        some = kept[0][:, rows], kept[1][:, rows]
        got = _mix(some, v[:, None], _lse(q[:, rows], k, start[2] + state[2], scale))
        return ((got - truth[:, rows]).square().sum(2) * weight[:, rows]).mean(1)

    best = [torch.zeros_like(x) for x in start]
    least = error(best, check)
    with torch.enable_grad():
        state = [torch.zeros_like(x).requires_grad_() for x in start]
        optimiser = torch.optim.Adam(state, lr=LEARNING_RATE)
        for _ in range(steps):
            optimiser.zero_grad()
            error(state, train).sum().backward()
            optimiser.step()
            with torch.no_grad():
                now = error(state, check)
                better = now < least
                least = torch.where(better, now, least)
                for old, new in zip(best, state, strict=True):
                    old.copy_(torch.where(better.view(-1, *(1,) * (old.dim() - 1)), new, old))
    return start[0] + best[0] * unit[0], start[1] + best[1] * unit[1], start[2] + best[2]
