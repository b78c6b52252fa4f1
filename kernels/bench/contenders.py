"""Who is timed: our attention in its variants, and torch's, transformers', FlashAttention's and FlashInfer's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kernels.api import DEFAULT_SCHEDULE, Options, attend
from kernels.bench.streams import Paged, Streams, copies_for, make_paged
from kernels.bench.timing import Contender
from kernels.schedule import Schedule

PACKED = "sdpa bf16 packed, bucketed"
PLAIN_READ = "plain read"
COPY = "copy"


def ours(
    name: str,
    streams: Streams,
    paged: Paged,
    q_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str | None = None,
    want_mass: bool = False,
    schedule: Schedule = DEFAULT_SCHEDULE,
    prepared: bool = False,
) -> Contender:
    """`kernels.api.attend` over paged streams; a call a copy.

    Args:
        name: of the contender.
        streams: where the queries come from.
        paged: what is attended.
        q_dtype: of the queries; half types allow half arithmetic.
        backend: as in `attend`.
        want_mass: as there.
        schedule: as there.
        prepared: with Triton, whether tables are sorted before, as for all the steps of one plan; a captured graph
            would sort them in every replay.
    """
    q, scale = streams.q.to(q_dtype), streams.head_dim**-0.5
    if prepared:
        from kernels.gpu.attend import attend as run
        from kernels.gpu.prepare import prepare

        ready = [prepare(table, paged.pools, schedule.split_tokens) for table in paged.tables]
        options = Options(scale, want_mass=want_mass, schedule=schedule)
        calls = [
            partial(run, q, table, paged.pools, paged.first, options, one)
            for table, one in zip(paged.tables, ready, strict=True)
        ]
        return Contender(name, calls, paged.read_bytes)

    def call(c: int) -> object:
        return attend(
            q,
            paged.tables[c],
            paged.pools,
            paged.first,
            scale=scale,
            want_mass=want_mass,
            schedule=schedule,
            backend=backend,
        )

    return Contender(name, [partial(call, c) for c in range(len(paged.tables))], paged.read_bytes)


def plain_read(total_bytes: int, cold_bytes: int) -> list[Contender]:
    """Sums of the same number of bytes as float32 and as int64: what reading alone takes, the better one counts."""
    copies = copies_for(total_bytes, cold_bytes)
    memory = torch.ones(copies, total_bytes // 4)
    turns: Iterator[int] = itertools.count()
    floats = [row.sum for row in memory]
    integers = [row.view(torch.int64).sum for row in memory]
    found = ((f"{PLAIN_READ} fp32", floats), (f"{PLAIN_READ} int64", integers))
    return [Contender(name, calls, total_bytes, turns) for name, calls in found]


def device_copy(total_bytes: int, device: str) -> Contender:
    """A copy from memory to memory; counts the bytes read and the bytes written."""
    source, target = (torch.ones(2, total_bytes // 8, dtype=torch.int32, device=device) for _ in range(2))
    calls = [partial(target[c].copy_, source[c]) for c in range(2)]
    return Contender(COPY, calls, total_bytes)


def torch_rivals(streams: Streams, cold_bytes: int, compiled: bool = False) -> list[Contender]:
    """Torch's and transformers' attention over dense bf16 keys and values, the same memory for all.

    Args:
        streams: what to attend.
        cold_bytes: all copies together hold at least this.
        compiled: whether to compile FlexAttention too, which takes about half a minute.
    """
    copies = copies_for(streams.dense_bytes, cold_bytes)
    several = [Streams(streams.lengths, streams.k.clone(), streams.v.clone(), streams.q) for _ in range(copies)]
    buckets = [each.buckets() for each in several]
    turns: Iterator[int] = itertools.count()

    def rival(name: str, body: Callable[[int], object], note: str = "") -> Contender:
        return Contender(name, [partial(body, c) for c in range(copies)], streams.dense_bytes, turns, note)

    def packed(c: int) -> object:
        return [sdpa(q, k, v) for q, k, v in buckets[c]]

    def by_head(c: int) -> object:
        return [
            sdpa(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]) for q, k, v in buckets[c] for h in range(q.shape[1])
        ]

    def gqa(c: int) -> object:
        return [sdpa(q.flatten(1, 2)[:, :, None], k, v, enable_gqa=True) for q, k, v in buckets[c]]

    found = [
        rival(PACKED, packed),
        rival("sdpa bf16 loop over heads", by_head),
        rival("sdpa bf16 enable_gqa, bucketed", gqa),
    ]
    if len(buckets[0]) == 1:
        found += _full_rivals(streams, [b[0] for b in buckets], rival, compiled)
    return found


def padded_rivals(streams: Streams, cold_bytes: int, compiled: bool = False) -> list[Contender]:
    """The same for streams of different lengths, padded to the longest and masked."""
    several = [streams.padded() for _ in range(copies_for(streams.dense_bytes, cold_bytes))]
    turns: Iterator[int] = itertools.count()
    padded_bytes = 2 * several[0][0].nbytes
    note = f"reads {padded_bytes / 1e6:.0f} MB with the padding"

    def rival(name: str, body: Callable[[int], object]) -> Contender:
        return Contender(name, [partial(body, c) for c in range(len(several))], streams.dense_bytes, turns, note)

    q = streams.q[:, :, 0].bfloat16()[None]
    flat = q.flatten(1, 2)[:, :, None]

    def masked(c: int) -> object:
        k, v, visible = several[c]
        return sdpa(q, k, v, attn_mask=visible)

    heads = several[0][2].repeat_interleave(streams.q.shape[1], 1)
    found = [rival("sdpa bf16 packed, padded, mask", masked)]
    kv = [(flat, k, v) for k, v, _ in several]
    found += _transformers(streams, kv, rival, heads)
    if compiled:
        found.append(_flex(streams, kv, rival))
    return found


def _full_rivals(
    streams: Streams, dense: list[tuple[Tensor, Tensor, Tensor]], rival: Callable[..., Contender], compiled: bool
) -> list[Contender]:
    """What takes one length only."""
    flat = [(q.flatten(1, 2)[:, :, None], k, v) for q, k, v in dense]
    found = _transformers(streams, flat, rival, None)
    if compiled:
        found.append(_flex(streams, flat, rival))
    return found


def _transformers(
    streams: Streams,
    dense: list[tuple[Tensor, Tensor, Tensor]],
    rival: Callable[..., Contender],
    visible: Tensor | None,
) -> list[Contender]:
    """Transformers' own attention functions, as its models call them; none without transformers."""
    module = SimpleNamespace(num_key_value_groups=streams.q.shape[1], is_causal=True, training=False)
    mask = None if visible is None else torch.zeros_like(visible, dtype=torch.bfloat16).masked_fill(~visible, -1e30)

    def call(which: str, mask: Tensor | None, c: int) -> object:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.llama.modeling_llama import eager_attention_forward

        run: Any = sdpa_attention_forward if which == "sdpa" else eager_attention_forward
        return run(module, *dense[c], mask, scaling=streams.head_dim**-0.5, dropout=0.0)[0]

    return [
        rival("transformers sdpa", partial(call, "sdpa", visible)),
        rival("transformers eager", partial(call, "eager", mask)),
    ]


def _flex(streams: Streams, dense: list[tuple[Tensor, Tensor, Tensor]], rival: Callable[..., Contender]) -> Contender:
    """Compiled FlexAttention; a block mask hides what lies behind a stream's length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    run: Any = torch.compile(flex_attention, dynamic=False)
    longest = streams.lengths[0]
    mask = None
    if min(streams.lengths) < longest:
        device = streams.device
        held = torch.tensor(streams.lengths, device=device).repeat_interleave(streams.q.shape[1])
        mask = create_block_mask(lambda b, h, i, j: j < held[h], 1, len(held), 1, longest, device=str(device))

    def call(c: int) -> object:
        q, k, v = dense[c]
        return run(q, k, v, block_mask=mask, enable_gqa=True)

    return rival("FlexAttention compiled", call)


def flash_rivals(streams: Streams, sequences: int, page_tokens: int, cold_bytes: int) -> list[Contender]:
    """FlashAttention's and FlashInfer's decode on a GPU, over `sequences` sequences of one length.

    A library that is not there is a contender that fails with its import error, so that the record says so.
    """
    kv_heads = len(streams.lengths) // sequences
    length, d, group = streams.lengths[0], streams.head_dim, streams.q.shape[1]
    copies = copies_for(streams.dense_bytes, cold_bytes)
    turns: Iterator[int] = itertools.count()
    q = streams.q.bfloat16().view(sequences, kv_heads * group, d)
    state: dict[str, Any] = {}

    def by_token() -> list[tuple[Tensor, Tensor]]:
        """[sequences, T, Hk, D] each, made when the first library asks."""
        if "kv" not in state:
            shaped = [x.view(sequences, kv_heads, length, d).transpose(1, 2) for x in (streams.k, streams.v)]
            state["kv"] = [(shaped[0].contiguous(), shaped[1].contiguous()) for _ in range(copies)]
        return state["kv"]

    def flash(c: int) -> object:
        from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

        k, v = by_token()[c]
        return flash_attn_with_kvcache(q[:, None], k, v)

    def infer(c: int) -> object:
        if "wrapper" not in state:
            state["wrapper"] = _flashinfer_plan(sequences, length, kv_heads, group, d, page_tokens)
        k, v = by_token()[c]
        paged = tuple(x.view(-1, page_tokens, kv_heads, d) for x in (k, v))
        return state["wrapper"].run(q, paged)

    return [
        Contender(name, [partial(body, c) for c in range(copies)], streams.dense_bytes, turns)
        for name, body in (("flash_attn with kvcache", flash), ("FlashInfer paged decode", infer))
    ]


def _flashinfer_plan(sequences: int, length: int, kv_heads: int, group: int, d: int, page_tokens: int) -> Any:
    """FlashInfer's decode wrapper, planned for sequences whose pages lie in order."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    pages = length // page_tokens
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * pages
    indices = torch.arange(sequences * pages, dtype=torch.int32, device="cuda")
    last = torch.full((sequences,), page_tokens, dtype=torch.int32, device="cuda")
    wrapper.plan(indptr, indices, last, kv_heads * group, kv_heads, d, page_tokens, q_data_type=torch.bfloat16)
    return wrapper


def our_formats(
    streams: Streams,
    cold_bytes: int,
    page_tokens: tuple[int, ...],
    formats: tuple[str, ...] = ("bf16", "int8", "int4"),
    backend: str | None = None,
) -> list[Contender]:
    """Ours with half queries: every format in every page size."""
    return [
        ours(our_name(name, p), streams, make_paged(streams, (name,), p, cold_bytes), backend=backend)
        for p in page_tokens
        for name in formats
    ]


def our_name(name: str, page_tokens: int = 16) -> str:
    """Of a contender of `our_formats`."""
    return f"ours {name} P{page_tokens}"
