"""Bad input: one ValueError that names the argument, its value and what is allowed, or behaviour the docstrings state.

Every public function of kernels/ has rows here; each row changes one argument of a call that is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from exactness import check, oracle
from paged_case import Case, make_case
from torch import Tensor

import kernels.api as api
from kernels import linear_attention as linear
from kernels.api import PageTable, Pool, Schedule, append, attend, gather, scatter
from kernels.background import fit_background
from kernels.cost import FEATURES, CostModel, safe_variants
from kernels.gemv import gemv_bf16
from kernels.linear_attention import FeatureMap
from kernels.mixture import attend_mixture
from kernels.pages import decode, encode, page_format, views
from kernels.prefill import chunk_attention, page_mass
from kernels.prototypes import encode_prototypes, join_pages, make_prototypes
from kernels.scoring import mean_key_score, narrow, page_bounds, query_bound, top_pages, update_mass
from kernels.state import Partial, merge

FAST = ("cpu", "torch")
BF16 = page_format("bf16", 16, 64)
INT8 = page_format("int8", 16, 64)
PROTO = page_format("proto", 16, 64, 2)
CASE = make_case(0, ("bf16", "int8"), (20, 100), tokens=2)


def pool_of(pages: int = 4) -> Pool:
    return Pool(BF16, (torch.zeros(pages, BF16.page_bytes, dtype=torch.uint8),))


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def meta(x: Tensor) -> Tensor:
    """A tensor of another device."""
    return x.to("meta")


def attended(**changes: object) -> object:
    arguments: dict[str, object] = {
        "q": CASE.q,
        "table": CASE.table,
        "pools": CASE.pools,
        "first_position": CASE.first_position,
        "scale": 0.125,
    }
    return attend(**{**arguments, **changes})  # type: ignore[arg-type]


def table(**changes: Tensor) -> PageTable:
    return replace(CASE.table, **changes)


def appended(**changes: object) -> None:
    new = torch.zeros(1, 2, 64)
    arguments: dict[str, object] = {
        "k": new,
        "v": new,
        "table_slot": i32(0, 1)[None],
        "offset": i32(3, 4),
        "pool": pool_of(),
    }
    append(**{**arguments, **changes})  # type: ignore[arg-type]


def scored(**changes: object) -> Tensor:
    bounds = torch.zeros(2, 5, 64)
    arguments: dict[str, object] = {"q": torch.zeros(2, 3, 1, 64), "lowest": bounds, "highest": bounds}
    return query_bound(**{**arguments, **changes})  # type: ignore[arg-type]


def chosen(**changes: object) -> tuple[Tensor, Tensor]:
    arguments: dict[str, object] = {"score": torch.zeros(2, 5), "count": i32(5, 3), "k": i32(2, 2), "width": 4}
    return top_pages(**{**arguments, **changes})  # type: ignore[arg-type]


def chunk(**changes: object) -> tuple[Tensor, Tensor]:
    keys = torch.zeros(2, 10, 64)
    arguments: dict[str, object] = {"q": torch.zeros(4, 3, 64), "k": keys, "v": keys, "scale": 0.125}
    return chunk_attention(**{**arguments, **changes})  # type: ignore[arg-type]


def backed(**changes: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.zeros(2, 10, 64)
    arguments: dict[str, object] = {"q": rows, "k": rows, "v": rows, "scale": 0.125}
    return fit_background(**{**arguments, **changes})  # type: ignore[arg-type]


MAP = linear.elu_map(0.125)
STATE = linear.empty_state(2, 64, 64)
ZEROS = torch.zeros(2, 16, 64)
COLUMNS = i32(0, 1, 0, 1).view(2, 2)

BAD: dict[str, tuple[Callable[[], object], str]] = {
    # attend
    "attend q of three axes": (lambda: attended(q=CASE.q[0]), r"q \(3, 2, 64\).*must be \[S, G, T, D\]"),
    "attend q of integers": (lambda: attended(q=CASE.q.int()), r"q torch.int32: must be one of torch.float32"),
    "attend q of float64": (lambda: attended(q=CASE.q.double()), r"q torch.float64: must be one of"),
    "attend q elsewhere": (lambda: attended(q=meta(CASE.q)), r"table on cpu: must be on q's device, meta"),
    "attend other streams": (lambda: attended(q=CASE.q[:1]), r"q \(1, .*S=2"),
    "attend other head size": (lambda: attended(q=CASE.q[..., :32]), r"pool of D=64, P=16: must have D=32 like q"),
    "attend positions of int64": (
        lambda: attended(first_position=CASE.first_position.long()),
        r"first_position torch.int64: must be torch.int32",
    ),
    "attend positions elsewhere": (
        lambda: attended(first_position=meta(CASE.first_position)),
        r"first_position on meta: must be on q's device, cpu",
    ),
    "attend positions of another shape": (lambda: attended(first_position=i32(1)), r"first_position \(1,\)"),
    "attend a pool elsewhere": (
        lambda: attended(pools=(replace(CASE.pools[0], slabs=tuple(meta(x) for x in CASE.pools[0].slabs)),)),
        r"pool bf16 on meta: must be on q's device, cpu",
    ),
    "attend pools of two page sizes": (
        lambda: attended(pools=(*CASE.pools, Pool(page_format("bf16", 32, 64), ()))),
        r"P=32: must have D=64 like q and P=16",
    ),
    "attend slopes of another shape": (lambda: attended(slopes=torch.zeros(2, 9)), r"slopes \(2, 9\): must be"),
    "attend slopes elsewhere": (lambda: attended(slopes=meta(torch.zeros(2, 3))), r"slopes on meta"),
    "attend a negative window": (lambda: attended(window_tokens=-1), r"window_tokens=-1: must be 0"),
    "attend windows of int64": (
        lambda: attended(window_tokens=torch.zeros(2).long()),
        r"window_tokens torch.int64 \(2,\): must be torch.int32 \[2\]",
    ),
    "attend windows of other streams": (lambda: attended(window_tokens=i32(1, 2, 3)), r"window_tokens .*\(3,\)"),
    "attend negative sinks": (lambda: attended(sink_tokens=-5), r"sink_tokens=-5: must be 0 or more"),
    "attend an unknown backend": (lambda: attended(backend="gpu"), r"backend='gpu': must be one of cpu, triton"),
    # tables, pools, schedules, merges
    "table slots of int64": (lambda: table(slot=CASE.table.slot.long()), r"table.slot torch.int64"),
    "table pages of another shape": (lambda: table(page=CASE.table.page[:, 1:]), r"table.page .*must be torch.int32"),
    "table counts of int64": (lambda: table(count=CASE.table.count.long()), r"table.count torch.int64"),
    "pool of another page size": (lambda: Pool(BF16, (torch.zeros(2, 64, dtype=torch.uint8),)), r"slab .*\(2, 64\)"),
    "pool of floats": (lambda: Pool(BF16, (torch.zeros(2, BF16.page_bytes),)), r"slab torch.float32"),
    "pool of strided pages": (
        lambda: Pool(BF16, (torch.zeros(4, BF16.page_bytes, dtype=torch.uint8)[::2],)),
        r"slabs: must be contiguous",
    ),
    "schedule arithmetic": (lambda: Schedule(arithmetic="int"), r"arithmetic='int': must be one of auto"),
    "schedule split": (lambda: Schedule(split_tokens=100), r"split_tokens=100: must be a positive multiple of 256"),
    "schedule threads": (lambda: Schedule(threads=-1), r"threads=-1: must be 0 or more"),
    "merge of nothing": (lambda: merge([]), r"merge of 0 partials: must be at least 1"),
    # formats and pages
    "format name": (lambda: page_format("int3", 16, 64), r"name='int3': must be one of fp32"),
    "format page": (lambda: page_format("bf16", 8, 64), r"page_tokens=8: must be one of \(16, 32, 64\)"),
    "format head size": (lambda: page_format("bf16", 16, 60), r"head_dim=60: must be a positive multiple of 8"),
    "format no head size": (lambda: page_format("bf16", 16, 0), r"head_dim=0"),
    "format groups": (lambda: page_format("proto", 16, 64, 17), r"groups=17: must be"),
    "encode short pages": (lambda: encode(INT8, ZEROS[:, :15], ZEROS[:, :15]), r"encode k \(2, 15, 64\).*M, 16, 64"),
    "encode unlike shapes": (lambda: encode(INT8, ZEROS, ZEROS[:1]), r"encode k .* v \(1, 16, 64\)"),
    "encode integers": (lambda: encode(INT8, ZEROS.int(), ZEROS), r"encode k torch.int32: must be a float type"),
    "encode two devices": (lambda: encode(INT8, ZEROS, meta(ZEROS)), r"encode v on meta: must be on k's device, cpu"),
    "encode an unknown backend": (lambda: encode(INT8, ZEROS, ZEROS, "gpu"), r"backend='gpu'"),
    "decode another format's pages": (
        lambda: decode(INT8, torch.zeros(1, BF16.page_bytes, dtype=torch.uint8)),
        r"slab .*must be uint8 \[M, 2240\]",
    ),
    "views of floats": (lambda: views(INT8, torch.zeros(1, 2240)), r"slab torch.float32"),
    # append, gather, scatter
    "append to quantised pages": (
        lambda: appended(pool=Pool(INT8, (torch.zeros(1, INT8.page_bytes, dtype=torch.uint8),))),
        r"append to format 'int8': must be fp32, bf16 or fp16",
    ),
    "append unlike shapes": (lambda: appended(v=torch.zeros(1, 1, 64)), r"append k .*v \(1, 1, 64\)"),
    "append another head size": (
        lambda: appended(k=torch.zeros(1, 2, 32), v=torch.zeros(1, 2, 32)),
        r"append k \(1, 2, 32\): must have D=64 like pool",
    ),
    "append integers": (lambda: appended(k=torch.zeros(1, 2, 64).int()), r"append k torch.int32: must be a float type"),
    "append slots of int64": (lambda: appended(table_slot=torch.zeros(1, 2).long()), r"append table_slot torch.int64"),
    "append elsewhere": (lambda: appended(v=meta(torch.zeros(1, 2, 64))), r"append v on meta"),
    "gather a slot too high": (lambda: gather(pool_of(), torch.tensor([0, 4])), r"slots 0 to 4: must be 0 to 3"),
    "gather a negative slot": (lambda: gather(pool_of(), torch.tensor([-1])), r"slots -1 to -1: must be 0 to 3"),
    "gather slots of int32": (lambda: gather(pool_of(), i32(0)), r"slots torch.int32 .*must be torch.int64"),
    "scatter short blobs": (
        lambda: scatter(pool_of(), torch.tensor([0]), torch.zeros(1, 8, dtype=torch.uint8)),
        r"blobs .*\(1, 8\): must be uint8 \[1, 4096\]",
    ),
    "scatter too few blobs": (
        lambda: scatter(pool_of(), torch.tensor([0, 1]), torch.zeros(1, 4096, dtype=torch.uint8)),
        r"must be uint8 \[2, 4096\]",
    ),
    # scores
    "query_bound integers": (lambda: scored(q=torch.zeros(2, 3, 1, 64).int()), r"query_bound q torch.int32"),
    "query_bound another head size": (lambda: scored(q=torch.zeros(2, 3, 1, 32)), r"query_bound .*\(2, 5, 64\)"),
    "query_bound unlike bounds": (lambda: scored(highest=torch.zeros(2, 4, 64)), r"query_bound .*\(2, 4, 64\)"),
    "query_bound a count too high": (lambda: scored(count=i32(1, 6)), r"count .*6.*must be 0 to 5"),
    "mean_key_score other streams": (
        lambda: mean_key_score(torch.zeros(2, 3, 1, 64), torch.zeros(3, 5, 64)),
        r"mean_key_score .*\(3, 5, 64\)",
    ),
    "update_mass unlike shapes": (lambda: update_mass(torch.zeros(2, 3), torch.zeros(2, 4), 0.5), r"mass .*\(2, 4\)"),
    "update_mass decay": (lambda: update_mass(torch.zeros(2, 3), torch.zeros(2, 3), 1.0), r"decay=1.0: must be 0 to"),
    "top_pages scores of float64": (lambda: chosen(score=torch.zeros(2, 5).double()), r"score torch.float64"),
    "top_pages more than its width": (lambda: chosen(k=i32(5, 1)), r"k .*5.*must be 0 to 4"),
    "top_pages a negative k": (lambda: chosen(k=i32(-1, 1)), r"k -1.*must be 0 to 4"),
    "top_pages a count too high": (lambda: chosen(count=i32(6, 1)), r"count .*6.*must be 0 to 5"),
    "narrow to a column outside": (
        lambda: narrow(CASE.table, i32(0, 99, 0, 1).view(2, 2), i32(2, 2)),
        r"narrow columns .*99.*: must be 0 to",
    ),
    "narrow columns of int64": (lambda: narrow(CASE.table, COLUMNS.long(), i32(2, 2)), r"columns torch.int64"),
    # approximations
    "prototypes of no group": (lambda: make_prototypes(ZEROS, ZEROS, 0), r"groups=0: must be 1 or more"),
    "prototypes of unlike shapes": (lambda: make_prototypes(ZEROS, ZEROS[:1], 2), r"v \(1, 16, 64\)"),
    "prototypes method": (lambda: make_prototypes(ZEROS, ZEROS, 2, method="x"), r"method='x': must be one of"),
    "prototypes for another format": (
        lambda: encode_prototypes(INT8, ZEROS[:, :2], ZEROS[:, :2], torch.zeros(2, 2)),
        r"for format int8: must be proto",
    ),
    "prototypes of other groups": (
        lambda: encode_prototypes(PROTO, ZEROS[:, :3], ZEROS[:, :3], torch.zeros(2, 3)),
        r"k \(2, 3, 64\).*must be proto and \[M, 2, 64\]",
    ),
    "join_pages of no page": (lambda: join_pages(torch.zeros(1, 2, 16, 64), 0), r"span_pages=0: must be"),
    "linear tokens of another head size": (
        lambda: linear.add(STATE, MAP, ZEROS[..., :32], ZEROS[..., :32]),
        r"linear state .*k \(2, 16, 32\)",
    ),
    "linear queries of other streams": (
        lambda: linear.attend(torch.zeros(3, 1, 1, 64), STATE, MAP),
        r"q \(3, 1, 1, 64\)",
    ),
    "linear states of two shapes": (
        lambda: linear.merge_states(STATE, linear.empty_state(3, 64, 64)),
        r"states .*\(3, 64, 64\): must be of one shape",
    ),
    "linear map name": (lambda: replace(MAP, name="cos"), r"name='cos': must be one of favor"),
    "background method": (lambda: backed(method="x"), r"method='x': must be one of mean, closed, gradient"),
    "background unlike shapes": (lambda: backed(v=torch.zeros(2, 9, 64)), r"v \(2, 9, 64\)"),
    "background gradient without kept": (lambda: backed(method="gradient"), r"kept=None: method 'gradient' needs"),
    "mixture part of another shape": (
        lambda: attend_mixture(
            CASE.q, CASE.table, CASE.pools, CASE.first_position, [CASE.only(0).run("torch")], scale=0.125
        ),
        r"extra\[0\] of out \(1, 3, 2, 64\).*: must be \(2, 3, 2, 64\)",
    ),
    # linears and chunks
    "gemv of bf16 activations": (
        lambda: gemv_bf16(torch.zeros(1, 8).bfloat16(), torch.zeros(4, 8).bfloat16()),
        r"linear x torch.bfloat16",
    ),
    "gemv of other inputs": (lambda: gemv_bf16(torch.zeros(1, 7), torch.zeros(4, 8).bfloat16()), r"x .*\(1, 7\)"),
    "gemv of strided weights": (
        lambda: gemv_bf16(torch.zeros(1, 4), torch.zeros(4, 8).bfloat16().T),
        r"weight of strides \(1, 8\): must be contiguous",
    ),
    "chunk longer than the keys": (lambda: chunk(q=torch.zeros(4, 11, 64)), r"chunk q \(4, 11, 64\).*0 < T <= Tk"),
    "chunk of three heads over two": (lambda: chunk(q=torch.zeros(3, 3, 64)), r"Hq a multiple of Hk"),
    "chunk with a negative window": (lambda: chunk(window_tokens=-1), r"window_tokens=-1: must be 0"),
    # numbers, types and devices that used to pass or to end in another error
    "attend a scale of NaN": (lambda: attended(scale=math.nan), r"scale=nan: must be a finite number"),
    "attend an infinite scale": (lambda: attended(scale=math.inf), r"scale=inf: must be a finite number"),
    "attend a scale of text": (lambda: attended(scale="x"), r"scale='x': must be a finite number"),
    "attend a window of 1.5": (lambda: attended(window_tokens=1.5), r"window_tokens=1.5: must be 0 .*an int"),
    "attend a window of True": (lambda: attended(window_tokens=True), r"window_tokens=True: must be 0"),
    "attend a window beyond int32": (lambda: attended(window_tokens=2**31), r"window_tokens=2147483648: .*at most"),
    "attend sinks of 1.5": (lambda: attended(sink_tokens=1.5), r"sink_tokens=1.5: must be 0"),
    "attend sinks beyond int32": (lambda: attended(sink_tokens=2**70), r"sink_tokens=\d+: must be 0"),
    "attend slopes of integers": (lambda: attended(slopes=torch.ones(2, 3).int()), r"slopes torch.int32: must be a"),
    "attend slopes of bools": (lambda: attended(slopes=torch.ones(2, 3) > 0), r"slopes torch.bool: must be a float"),
    "attend complex slopes": (lambda: attended(slopes=torch.ones(2, 3) * 1j), r"slopes torch.complex64: must be"),
    "attend no schedule": (lambda: attended(schedule=None), r"schedule=None: must be a Schedule"),
    "attend a pool for pools": (lambda: attended(pools=CASE.pools[0]), r"pools=Pool: must be a sequence"),
    "attend a list for a backend": (lambda: attended(backend=["cpu"]), r"backend=\['cpu'\]: must be one of"),
    "table count elsewhere": (lambda: table(count=meta(CASE.table.count)), r"table.count on meta: must be on"),
    "table slot elsewhere": (lambda: table(slot=meta(CASE.table.slot)), r"table.slot on meta: must be on table.pool"),
    "schedule threads of 1.5": (lambda: Schedule(threads=1.5), r"threads=1.5: must be 0"),  # type: ignore[arg-type]
    "schedule threads of True": (lambda: Schedule(threads=True), r"threads=True: must be 0"),
    "schedule a split of 256.0": (lambda: Schedule(split_tokens=256.0), r"split_tokens=256.0"),  # type: ignore[arg-type]
    "format D of 64.0": (lambda: page_format("bf16", 16, 64.0), r"head_dim=64.0: must be an int"),  # type: ignore[arg-type]
    "format P of 16.0": (lambda: page_format("bf16", 16.0, 64), r"page_tokens=16.0: must be"),  # type: ignore[arg-type]
    "format groups of True": (lambda: page_format("proto", 16, 64, True), r"groups=True: must be an int"),
    "merge of integers": (
        lambda: merge([Partial(torch.zeros(1, 1, 1, 8).int(), torch.zeros(1, 1, 1))]),
        r"merge partials\[0\] out torch.int32: must be a float type",
    ),
    "encode prototypes by an unknown backend": (lambda: encode(PROTO, ZEROS, ZEROS, "x"), r"backend='x': must be"),
    "gather meta slots": (lambda: gather(pool_of(), meta(torch.zeros(2).long())), r"slots on meta: must be"),
    "page_bounds of integers": (lambda: page_bounds(ZEROS.int()), r"page_bounds k torch.int32: must be a float"),
    "page_bounds of two axes": (lambda: page_bounds(ZEROS[0]), r"page_bounds k \(16, 64\).*must be \[M, P, D\]"),
    "prototypes of integers": (lambda: make_prototypes(ZEROS.int(), ZEROS, 2), r"prototypes of k torch.int32"),
    "prototypes of 1.5 groups": (lambda: make_prototypes(ZEROS, ZEROS, 1.5), r"groups=1.5: must be 1"),  # type: ignore[arg-type]
    "prototypes stored of integers": (
        lambda: encode_prototypes(PROTO, ZEROS[:, :2].int(), ZEROS[:, :2], torch.zeros(2, 2)),
        r"prototypes k torch.int32: must be a float",
    ),
    "background of integers": (lambda: backed(k=torch.zeros(2, 10, 64).int()), r"background k torch.int32"),
    "background steps": (lambda: backed(steps=-1), r"steps=-1: must be 0"),
    "linear tokens of integers": (lambda: linear.add(STATE, MAP, ZEROS.int(), ZEROS), r"k torch.int32: must be a fl"),
    "linear tokens elsewhere": (lambda: linear.add(STATE, MAP, ZEROS, meta(ZEROS)), r"v on meta: must be on k's"),
    "linear queries of another head size": (
        lambda: linear.attend(torch.zeros(2, 1, 1, 32), linear.empty_state(2, 32, 64), MAP),
        r"q \(2, 1, 1, 32\) over s \(2, 32, 64\)",
    ),
    "linear map of other streams": (
        lambda: linear.add(STATE, FeatureMap("anchors", 0.1, torch.zeros(3, 64, 64)), ZEROS, ZEROS),
        r"projection \(3, 64, 64\): must be \(2, 64, 64\)",
    ),
    "linear centre of other streams": (
        lambda: linear.add(STATE, replace(MAP, centre=torch.zeros(3, 64)), ZEROS, ZEROS),
        r"centre \(3, 64\): must be \(2, 64\)",
    ),
    "linear offset elsewhere": (
        lambda: linear.attend(ZEROS[:, None], STATE, linear.elu_map(0.1, meta(torch.zeros(2)))),
        r"log2_offset on meta: must be on state's",
    ),
    "linear state in two places": (lambda: replace(STATE, tokens=meta(STATE.tokens)), r"state tokens on meta"),
    "linear map of no feature": (lambda: linear.favor_map(64, 0, 0.1, seed=0), r"features=0: must be 1"),
    "linear map of an infinite scale": (lambda: linear.elu_map(math.inf), r"scale=inf: must be a finite"),
    "linear remove more than held": (
        lambda: linear.remove(linear.empty_state(2, 64, 64), MAP, ZEROS, ZEROS),
        r"remove of 16 tokens from stream 0: must be at most the 0",
    ),
    "costs of NaN": (lambda: CostModel({"cpu": [math.nan] * len(FEATURES)}), r"'cpu': launch=nan: must be a finite"),
    "variants of an unknown backend": (lambda: safe_variants("x", 1), r"backend='x': must be one of"),
    "variants of no thread": (lambda: safe_variants("cpu", 0), r"threads=0: must be 1"),
    "gemv activations elsewhere": (
        lambda: gemv_bf16(meta(torch.zeros(1, 8)), torch.zeros(4, 8).bfloat16()),
        r"linear weight on cpu: must be on x's device, meta",
    ),
    "gemv of no input": (lambda: gemv_bf16(torch.zeros(1, 0), torch.zeros(4, 0).bfloat16()), r"\(4, 0\): .*K > 0"),
    "gemv a weight of one axis": (lambda: gemv_bf16(torch.zeros(1, 8), torch.zeros(8).bfloat16()), r"weight \(8,\)"),
    "gemv a bias of another shape": (
        lambda: gemv_bf16(torch.zeros(1, 8), torch.zeros(4, 8).bfloat16(), torch.zeros(1)),
        r"bias torch.float32 \(1,\): must be float32 \[4\]",
    ),
    "gemv an unknown backend": (
        lambda: gemv_bf16(torch.zeros(20, 8), torch.zeros(4, 8).bfloat16(), backend="x"),
        r"backend='x': must be 'cpu', 'torch' or None",
    ),
    "chunk without a key head": (
        lambda: chunk(k=torch.zeros(0, 10, 64), v=torch.zeros(0, 10, 64)),
        r"chunk .*\(0, 10, 64\).*Hk > 0",
    ),
    "chunk slopes of another shape": (lambda: chunk(slopes=torch.zeros(3)), r"slopes \(3,\): must be \[Hq\] = \(4,\)"),
    "chunk of two types": (lambda: chunk(q=torch.zeros(4, 3, 64).bfloat16()), r"q torch.bfloat16.*of one type"),
    "chunk of integers": (lambda: chunk(**dict.fromkeys("qkv", torch.zeros(2, 3, 64).int())), r"q torch.int32: must"),
    "chunk a window of 1.5": (lambda: chunk(window_tokens=1.5), r"window_tokens=1.5: must be 0"),
    "page_mass of no page size": (
        lambda: page_mass(torch.zeros(4, 3, 64), torch.zeros(4, 3), torch.zeros(2, 10, 64), 0, 0.1),
        r"page_tokens=0: must be 1",
    ),
    "page_mass lse of another shape": (
        lambda: page_mass(torch.zeros(4, 3, 64), torch.zeros(4, 2), torch.zeros(2, 10, 64), 16, 0.1),
        r"lse \(4, 2\).*must be \[Hq, T, D\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_error_names_the_argument(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize("backend", [*FAST, "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slot[1].fill_(999), r"table.slot=999 of stream 1, entry 0: must be 0 to"),
        (lambda t: t.slot[0].fill_(-1), r"table.slot=-1 of stream 0, entry 0: must be 0 to"),
        (lambda t: t.pool[0].fill_(7), r"table.pool=7 of stream 0, entry 0: must be 0 to 1"),
        (lambda t: t.pool[0].fill_(-1), r"table.pool=-1 of stream 0"),
        (lambda t: t.page[1].fill_(-3), r"table.page=-3 of stream 1, entry 0: must be 0 or more"),
        (lambda t: t.count[1].fill_(99), r"table.count=99 of stream 1, entry 0: must be 0 to"),
        (lambda t: t.count[0].fill_(-1), r"table.count=-1 of stream 0"),
    ],
)
def test_entries_outside_the_pools_are_refused_in_debug_mode(
    change: Callable[[PageTable], object], message: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = CASE.table
    copy = PageTable(t.pool.clone(), t.slot.clone(), t.page.clone(), t.count.clone())
    monkeypatch.setattr(api, "DEBUG", True)
    assert attended(table=copy, backend=backend) is not None
    change(copy)
    with pytest.raises(ValueError, match=message):
        attended(table=copy, backend=backend)


@pytest.mark.parametrize("backend", FAST)
def test_a_negative_window_of_one_stream_hides_all_but_the_sinks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(9, ("fp32",), (60, 60))
    got = case.run(backend, window_tokens=i32(-5, 10), sink_tokens=4)
    want = oracle(case, 0.125, i32(-5, 10), 4)
    check(got, want, 1e-5)
    monkeypatch.setattr(api, "DEBUG", True)
    with pytest.raises(ValueError, match=r"window_tokens -5 of a stream: must be 0"):
        case.run(backend, window_tokens=i32(-5, 10))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("change", [{"table_slot": i32(0, 4)[None]}, {"table_slot": i32(-1, 0)[None]},
                                    {"offset": i32(0, 16)}, {"offset": i32(-1, 3)}])  # fmt: skip
def test_an_append_out_of_range_writes_nothing(change: dict[str, Tensor], backend: str) -> None:
    pool = pool_of()
    with pytest.raises(ValueError, match=rf"append {next(iter(change))} .*must be 0 to"):
        appended(**change, pool=pool, k=torch.ones(1, 2, 64), v=torch.ones(1, 2, 64), backend=backend)
    assert not pool.slabs[0].any()


def strided(x: Tensor) -> Tensor:
    """The same numbers with gaps between them."""
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_any_strides_are_taken(backend: str) -> None:
    case = make_case(3, ("fp32", "int8"), (40, 200), tokens=3)
    t = case.table
    windows, slopes = i32(0, 50), torch.rand(2, 3)
    want = case.run(backend, window_tokens=windows, slopes=slopes, want_mass=True)
    transposed = case.q.transpose(1, 3).contiguous().transpose(1, 3)
    gaps = PageTable(strided(t.pool), strided(t.slot), strided(t.page), strided(t.count))
    other = Case(transposed, gaps, case.pools, strided(case.first_position), case.lengths)
    got = other.run(backend, window_tokens=strided(windows), slopes=strided(slopes), want_mass=True)
    assert got.mass is not None
    assert want.mass is not None
    for a, b in ((got.out, want.out), (got.lse, want.lse), (got.mass, want.mass)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", FAST)
def test_a_nan_in_a_query_spoils_its_row_only(backend: str, dtype: torch.dtype) -> None:
    case = make_case(4, ("bf16", "int8", "int4", "proto"), (0, 50, 1500), tokens=3, group=4)
    case = replace(case, q=case.q.to(dtype))
    want = case.run(backend)
    spoiled = case.q.clone()
    spoiled[:, 2, 1, 5] = math.nan
    got = replace(case, q=spoiled).run(backend)
    row = torch.zeros(3, 4, 3, dtype=torch.bool)
    row[1:, 2, 1] = True  # the empty stream's row sees nothing and stays 0 and -inf
    assert got.out[row].isnan().all()
    assert got.lse[row].isnan().all()
    assert torch.equal(got.out[~row], want.out[~row])
    assert torch.equal(got.lse[~row], want.lse[~row])


@pytest.mark.parametrize("backend", FAST)
def test_an_infinity_in_a_query_reaches_no_other_row(backend: str) -> None:
    case = make_case(5, ("bf16", "int8"), (50, 300), group=4)
    want = case.run(backend)
    spoiled = case.q.clone()
    spoiled[:, 1, 0, 0] = math.inf
    got = replace(case, q=spoiled).run(backend)
    assert torch.equal(got.out[:, [0, 2, 3]], want.out[:, [0, 2, 3]])
    assert not torch.isfinite(got.lse[:, 1]).any()


@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_an_infinite_logit_makes_its_row_nan_and_no_other(backend: str) -> None:
    case = make_case(10, ("fp32",), (100, 100))
    want = case.run(backend, want_mass=True)
    slot, pool = int(case.table.slot[1, 0]), case.pools[0]
    first = int(case.table.page[1, 0]) == 100 // 16  # its last slots may be unwritten, its first is
    keys = views(pool.fmt, pool.slabs[slot // pool.slab_pages])["k"][slot % pool.slab_pages]
    keys[0, 0 if first else 3] = math.inf
    case.q[1, :, :, 0] = torch.tensor([1.0, -1.0, 1.0])[:, None]
    got = case.run(backend, want_mass=True)
    assert got.mass is not None
    assert want.mass is not None
    assert got.out[1, [0, 2]].isnan().all()
    assert got.lse[1, [0, 2]].isnan().all()
    assert torch.isfinite(got.lse[1, 1]).all()  # to that row the logit is -inf
    assert got.mass[1, : int(case.table.count[1])].isnan().all()
    for a, b in ((got.out, want.out), (got.lse, want.lse), (got.mass, want.mass)):
        assert torch.equal(a[0], b[0])
    joined = merge([got, want])
    assert joined.lse[1, [0, 2]].isnan().all()
    assert torch.isfinite(joined.lse[0]).all()


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("own", [100, 10_000, 1_000_000])
def test_alibi_is_exact_however_far_the_listed_keys_are(backend: str, own: int) -> None:
    case = make_case(11, ("fp32", "bf16"), (64, 4304), group=2)  # the second stream needs two blocks
    case = replace(case, first_position=i32(own, max(own, 4303)))
    slopes = torch.tensor([[0.5, 0.0625], [0.0039, 0.01]])
    got, want = (case.run(name, slopes=slopes, want_mass=True) for name in (backend, "reference"))
    assert ((got.out - want.out).norm(dim=-1) / want.out.norm(dim=-1)).max() < 1e-5
    assert ((got.lse - want.lse) / want.lse).abs().max() < 1e-6
    assert got.mass is not None
    assert want.mass is not None
    assert (got.mass - want.mass).abs().max() < 1e-5


def test_slopes_of_nan_are_refused_in_debug_mode_and_spoil_their_head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = torch.tensor([[0.1, math.nan, 0.1], [0.1, 0.1, 0.1]])
    for backend in FAST:
        got = CASE.run(backend, slopes=slopes)
        assert got.lse[0, 1].isnan().all()
        assert int(got.lse.isnan().sum()) == CASE.q.shape[2]
    monkeypatch.setattr(api, "DEBUG", True)
    with pytest.raises(ValueError, match="slopes with NaN or infinity: must be finite"):
        attended(slopes=slopes)


@pytest.mark.parametrize("backend", FAST)
def test_a_nan_in_a_visible_page_is_seen_and_stays_in_its_stream(backend: str) -> None:
    case = make_case(6, ("fp32",), (100, 100))
    want = case.run(backend)
    slot = int(case.table.slot[1, 0])
    pool = case.pools[0]
    views(pool.fmt, pool.slabs[slot // pool.slab_pages])["v"][slot % pool.slab_pages, 0] = math.nan
    got = case.run(backend)
    assert got.out[1].isnan().all()
    assert torch.equal(got.out[0], want.out[0])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_nan_and_infinity_are_stored_as_they_are(name: str, backend: str) -> None:
    fmt = page_format(name, 16, 64)
    pool = Pool(fmt, (torch.zeros(1, fmt.page_bytes, dtype=torch.uint8),))
    k = torch.tensor([math.nan, math.inf, -math.inf, 1.0]).repeat(16)[None, None]
    append(k, -k, i32(0)[None], i32(2), pool, backend=backend)
    got_k, got_v = decode(fmt, pool.slabs[0])
    assert torch.equal(got_k[0, 2].nan_to_num(7.0), k[0, 0].nan_to_num(7.0))
    assert torch.equal(got_v[0, 2].nan_to_num(7.0), (-k)[0, 0].nan_to_num(7.0))
    pages = torch.zeros(1, 16, 64)
    pages[0, 2] = k[0, 0]
    whole_k, whole_v = decode(fmt, encode(fmt, pages, pages, backend))
    assert torch.equal(whole_k.nan_to_num(7.0), got_k.nan_to_num(7.0))
    assert torch.equal(whole_v.nan_to_num(7.0), got_k.nan_to_num(7.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantising_what_is_not_finite_spoils_that_pages_keys_or_values_only(
    name: str, backend: str, bad: float
) -> None:
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 16, 64, generator=rng) for _ in range(2))
    fmt = page_format(name, 16, 64)
    want_k, want_v = decode(fmt, encode(fmt, k, v, backend))
    k[1, 3, 7], v[2, 15, 0] = bad, bad
    got_k, got_v = decode(fmt, encode(fmt, k, v, backend))
    assert got_k[1].isnan().all()
    assert got_v[2].isnan().all()
    assert torch.equal(got_k[[0, 2]], want_k[[0, 2]])
    assert torch.equal(got_v[[0, 1]], want_v[[0, 1]])


@pytest.mark.parametrize("backend", FAST)
def test_any_number_of_query_tokens_and_head_sizes_beyond_the_native_limit(backend: str) -> None:
    long = make_case(7, ("bf16",), (200,), tokens=130)
    check(long.run(backend), oracle(long, 0.125), 1e-5)
    wide = make_case(8, ("bf16",), (40,), head_dim=1032)
    check(wide.run(backend), oracle(wide, 1032**-0.5), 1e-5)


def test_empty_calls_do_nothing() -> None:
    pool = pool_of()
    none = torch.zeros(0, 2, 64)
    append(none, none, torch.zeros(0, 2, dtype=torch.int32), i32(0, 1), pool)
    append(torch.zeros(1, 0, 64), torch.zeros(1, 0, 64), torch.zeros(1, 0, dtype=torch.int32), i32(), pool)
    for backend in FAST:
        assert gather(pool, torch.zeros(0, dtype=torch.int64), backend).shape == (0, BF16.page_bytes)
        scatter(pool, torch.zeros(0, dtype=torch.int64), torch.zeros(0, BF16.page_bytes, dtype=torch.uint8), backend)
        for fmt in (BF16, INT8):
            assert encode(fmt, ZEROS[:0], ZEROS[:0], backend).shape == (0, fmt.page_bytes)
    assert not pool.slabs[0].any()
    assert encode(PROTO, ZEROS[:0], ZEROS[:0]).shape == (0, PROTO.page_bytes)
    assert decode(INT8, torch.zeros(0, INT8.page_bytes, dtype=torch.uint8))[0].shape == (0, 16, 64)
    assert gemv_bf16(torch.zeros(0, 8), torch.zeros(4, 8).bfloat16()).shape == (0, 4)
    state = linear.empty_state(2, 64, 64)
    linear.add(state, MAP, ZEROS[:, :0], ZEROS[:, :0])
    assert (linear.attend(torch.zeros(2, 1, 1, 64), state, MAP).lse == -math.inf).all()
