"""Pages as blobs: P tokens of one (layer, KV head) in one contiguous run of bytes, per storage format.

A move between tiers, a file write and a checksum are then one copy, and what is stored is what a kernel tiles
over. Keys lie channel-major `[D, P]` (P scores a register, per-channel scales fold into q), values
token-major `[P, D]`.

int8 and int4 quantise keys by channel within the page and values by token, both asymmetric, with the step and the
lowest value of each row kept as 8-bit codes on a grid of the page (a double quantisation, as in QLoRA): half the
bytes of a pair of fp16 for hardly more error. Relative error |x' - x| / |x| and bytes of a page measured on
SmolLM2-135M's keys (after RoPE) and values, 30 layers x 3 heads x 2,048 tokens of essays, P = 16, D = 64:

| scales, int4                           | page bytes | smaller than bf16 | keys | values |
|----------------------------------------|------------|-------------------|------|--------|
| keys by channel, 8-bit coded (chosen)  | 1,216      | 3.37x             | .031 | .096   |
| keys by channel, fp16 (KIVI)           | 1,344      | 3.05x             | .031 | .096   |
| keys by token, fp16                    | 1,152      | 3.56x             | .129 | .096   |
| keys by token, channel means taken off | 1,224      | 3.35x             | .049 | .096   |
| keys by channel, symmetric, fp16       | 1,216      | 3.37x             | .062 | .121   |

int8, chosen: 2,240 bytes, keys .0019, values .0057. P = 32, int4: 2,304 bytes (3.56x), keys .039, values .096.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

FORMAT_IDS = MappingProxyType({"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4, "proto": 5})
FLOAT_DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
LEVELS = MappingProxyType({"int8": 255, "int4": 15})
PAGE_TOKENS = (16, 32, 64)
ALIGN_BYTES = 64


@dataclass(frozen=True)
class Field:
    """Where one array lies in a page.

    Attributes:
        dtype: of its elements.
        shape: of one page's array.
        offset_bytes: from the start of the page.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def width_bytes(self) -> int:
        """Bytes the array takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PageFormat:
    """Layout of a page. Get one by `page_format`.

    Attributes:
        name: key of `FORMAT_IDS`.
        page_tokens: P.
        head_dim: D.
        groups: prototypes a page (C); 1 for every other format.
        fields: name -> `Field`. Floats: k [D, P], v [P, D]. int8, int4: k_codes, v_codes, k_scale, k_zero [D]
            and v_scale, v_zero [P] uint8, header [6] fp32. proto: k, v [C, D] bf16, log2_count [C]
            fp32.
        page_bytes: a multiple of 64.
    """

    name: str
    page_tokens: int
    head_dim: int
    groups: int
    fields: Mapping[str, Field]
    page_bytes: int

    def __hash__(self) -> int:
        """By what determines the layout."""
        return hash((self.name, self.page_tokens, self.head_dim, self.groups))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles by name, since a mapping proxy can't be pickled."""
        return page_format, (self.name, self.page_tokens, self.head_dim, self.groups)

    @property
    def format_id(self) -> int:
        """The number native code knows it by."""
        return FORMAT_IDS[self.name]

    @property
    def rows(self) -> int:
        """Key/value rows a page holds: C prototypes or P tokens."""
        return self.groups if self.name == "proto" else self.page_tokens

    @property
    def is_float(self) -> bool:
        """Whether tokens can be written one by one."""
        return self.name in FLOAT_DTYPES


def page_format(name: str, page_tokens: int, head_dim: int, groups: int = 1) -> PageFormat:
    """The layout of a page.

    Raises:
        ValueError: an unknown name, a page of other than 16, 32 or 64 tokens, a head size no multiple of 8,
            groups < 1, a number that is no int.
    """
    # Before the cache: to it 64.0 is 64 and True is 1, and what one caller gets all others would.
    if not isinstance(name, str) or name not in FORMAT_IDS:
        raise ValueError(f"format name={name!r}: must be one of {', '.join(FORMAT_IDS)}")
    for key, value in (("page_tokens", page_tokens), ("head_dim", head_dim), ("groups", groups)):
        if type(value) is not int:
            raise ValueError(f"format {key}={value!r}: must be an int")
    return _page_format(name, page_tokens, head_dim, groups)


@cache
def _page_format(name: str, page_tokens: int, head_dim: int, groups: int) -> PageFormat:
    """As `page_format`, so that equal formats are one object."""
    if page_tokens not in PAGE_TOKENS:
        raise ValueError(f"format page_tokens={page_tokens!r}: must be one of {PAGE_TOKENS}")
    if head_dim < 8 or head_dim % 8:
        raise ValueError(f"format head_dim={head_dim!r}: must be a positive multiple of 8")
    if not 1 <= groups <= page_tokens or (groups != 1 and name != "proto"):
        raise ValueError(f"format groups={groups!r}: must be 1 (1 to {page_tokens} for proto)")
    fields: dict[str, Field] = {}
    offset_bytes = 0
    for key, dtype, shape in _arrays(name, page_tokens, head_dim, groups):
        fields[key] = Field(dtype, shape, offset_bytes)
        offset_bytes += fields[key].width_bytes
    page_bytes = -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return PageFormat(name, page_tokens, head_dim, groups, MappingProxyType(fields), page_bytes)


def _arrays(name: str, p: int, d: int, c: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """The arrays of a page in the order they lie in; wide elements first, so that all are aligned."""
    if name in FLOAT_DTYPES:
        dtype = FLOAT_DTYPES[name]
        return [("k", dtype, (d, p)), ("v", dtype, (p, d))]
    if name == "proto":
        return [
            ("k", torch.bfloat16, (c, d)),
            ("v", torch.bfloat16, (c, d)),
            ("log2_count", torch.float32, (c,)),
        ]
    half = 1 if name == "int8" else 2
    u8 = torch.uint8
    codes = [("k_codes", u8, (d, p // half)), ("v_codes", u8, (p, d // half))]
    scales = [("k_scale", u8, (d,)), ("k_zero", u8, (d,)), ("v_scale", u8, (p,)), ("v_zero", u8, (p,))]
    return [*codes, ("header", torch.float32, (6,)), *scales]


def views(fmt: PageFormat, slab: Tensor) -> dict[str, Tensor]:
    """Typed strided views of a slab's arrays, to read or write in place.

    Args:
        fmt: the slab's format.
        slab: [M, page_bytes] uint8, rows contiguous.

    Returns:
        name -> [M, *shape].
    """
    if slab.dtype != torch.uint8 or slab.dim() != 2 or slab.shape[1] != fmt.page_bytes or slab.stride(1) != 1:
        raise ValueError(f"slab {slab.dtype} {tuple(slab.shape)}: must be uint8 [M, {fmt.page_bytes}], rows contiguous")
    out = {}
    for name, field in fmt.fields.items():
        raw = slab[:, field.offset_bytes : field.offset_bytes + field.width_bytes]
        out[name] = raw.view(field.dtype).unflatten(1, field.shape)
    return out


def encode(fmt: PageFormat, k: Tensor, v: Tensor, backend: str | None = None, threads: int | None = None) -> Tensor:
    """Stores full pages; any strides, so that views of a float page can be quantised directly.

    Args:
        fmt: target format; for "proto" the page's tokens are grouped by `prototypes.make_prototypes`.
        k: [M, P, D] float keys. Float formats store NaN and infinities as they are; in a quantised one a page with any
            among its keys decodes to keys that are all NaN, and no other page changes.
        v: [M, P, D] float values; NaN and infinities likewise spoil that page's values.
        backend: "cpu", "triton", "torch", or None for the fastest there is.
        threads: most threads of native code, the calling one included; None for `torch.get_num_threads()`.

    Returns:
        [M, page_bytes] uint8.

    Raises:
        ValueError: types, devices or shapes that don't match.
    """
    want = (fmt.page_tokens, fmt.head_dim)
    if k.dim() != 3 or k.shape != v.shape or k.shape[1:] != want:
        raise ValueError(f"encode k {tuple(k.shape)}, v {tuple(v.shape)}: must both be [M, {want[0]}, {want[1]}]")
    for name, value in (("k", k), ("v", v)):
        if not value.dtype.is_floating_point:
            raise ValueError(f"encode {name} {value.dtype}: must be a float type")
    if v.device != k.device:
        raise ValueError(f"encode v on {v.device}: must be on k's device, {k.device}")
    chosen = _choose(backend, k.device.type)
    if fmt.name == "proto":
        from kernels.prototypes import encode_prototypes, make_prototypes

        return encode_prototypes(fmt, *make_prototypes(k, v, fmt.groups))
    if chosen == "cpu" and k.device.type == "cpu":
        from kernels.cpu.backend import encode as native

        return native(fmt, k, v, threads)
    if chosen == "triton":
        from kernels.gpu.encode import encode as launch

        return launch(fmt, k, v)
    blobs = torch.zeros(k.shape[0], fmt.page_bytes, dtype=torch.uint8, device=k.device)
    out = views(fmt, blobs)
    if fmt.is_float:
        out["k"].copy_(k.transpose(1, 2))
        out["v"].copy_(v)
        return blobs
    _quantise_into(out, "k", k.transpose(1, 2).float(), LEVELS[fmt.name])
    _quantise_into(out, "v", v.float(), LEVELS[fmt.name])
    return blobs


def _choose(backend: str | None, device: str) -> str:
    """As `kernels.api.choose_backend`, which imports this file."""
    from kernels.api import choose_backend

    return choose_backend(backend, device)


def decode(
    fmt: PageFormat,
    blobs: Tensor,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The keys and values of stored pages.

    Args:
        fmt: the pages' format.
        blobs: [M, page_bytes] uint8.
        dtype: of the result.
        backend: as in `encode`; the result is the same.
        threads: as in `encode`.

    Returns:
        k, v: [M, P, D] each ([M, C, D] for "proto"; log2 counts: `views`).
    """
    arrays = views(fmt, blobs)
    if fmt.name == "proto":
        return arrays["k"].to(dtype), arrays["v"].to(dtype)
    if fmt.is_float:
        return arrays["k"].transpose(1, 2).to(dtype), arrays["v"].to(dtype)
    if blobs.device.type == "cpu" and _choose(backend, "cpu") == "cpu":
        from kernels.cpu.backend import transcode as native

        near = next((name for name, its in FLOAT_DTYPES.items() if its == dtype), "fp32")
        wide = page_format(near, fmt.page_tokens, fmt.head_dim)
        arrays = views(wide, native(fmt, blobs, wide, threads))
        return arrays["k"].transpose(1, 2).to(dtype), arrays["v"].to(dtype)
    header = arrays["header"]
    keys = _dequantise(arrays, "k", header[:, :3])
    values = _dequantise(arrays, "v", header[:, 3:])
    return keys.transpose(1, 2).to(dtype), values.to(dtype)


def transcode(
    source: PageFormat, blobs: Tensor, target: PageFormat, backend: str | None = None, threads: int | None = None
) -> Tensor:
    """Pages of one format as pages of another: `encode` of what `decode` gives, to the bit, without holding that.

    Args:
        source: the pages' format, any but "proto".
        blobs: [M, page_bytes] uint8.
        target: format wanted, of the same P and D.
        backend: as in `encode`.
        threads: as in `encode`; a worker thread beside a model asks for 1.

    Returns:
        [M, target.page_bytes] uint8; `blobs` itself where the formats are one.

    Raises:
        ValueError: prototypes, which are no page's tokens, another P or D, blobs of another size.
    """
    if source.name == "proto" or (source.page_tokens, source.head_dim) != (target.page_tokens, target.head_dim):
        raise ValueError(
            f"transcode of {source.name} pages of P={source.page_tokens}, D={source.head_dim} to {target.name} of "
            f"P={target.page_tokens}, D={target.head_dim}: must be no 'proto', and of the same P and D"
        )
    arrays = views(source, blobs)
    if source == target:
        return blobs
    if target.name != "proto" and blobs.device.type == "cpu" and _choose(backend, "cpu") == "cpu":
        from kernels.cpu.backend import transcode as native

        return native(source, blobs, target, threads)
    if source.is_float:  # read where they lie
        return encode(target, arrays["k"].transpose(1, 2), arrays["v"], backend, threads)
    return encode(target, *decode(source, blobs, backend=backend, threads=threads), backend, threads)


def _quantise_into(out: dict[str, Tensor], name: str, x: Tensor, levels: int) -> None:
    """Quantises x [M, A, B] by rows A; step and lowest value of a row are 8-bit codes on page-wide grids.

    The lowest value is coded downwards and the step upwards, so that a row's range is always covered and no
    element is off by more than half its step.
    """
    lowest, highest = x.amin(2), x.amax(2)
    base = lowest.amin(1, keepdim=True)
    zero_unit = (lowest.amax(1, keepdim=True) - base) / 255
    zero_code = _ratio(lowest - base, zero_unit).floor().clamp(0, 255)
    zero = base + zero_code * zero_unit
    step_needed = (highest - zero) / levels
    step_unit = step_needed.amax(1, keepdim=True) / 255
    step_code = _ratio(step_needed, step_unit).ceil().clamp(0, 255)
    step = step_code * step_unit
    codes = _ratio(x - zero[..., None], step[..., None]).round().clamp(0, levels).to(torch.uint8)
    if levels == 15:
        low, high = codes.chunk(2, 2)
        codes = low | (high << 4)
    out[f"{name}_codes"].copy_(codes)
    out[f"{name}_scale"].copy_(step_code)
    out[f"{name}_zero"].copy_(zero_code)
    first = 0 if name == "k" else 3
    out["header"][:, first : first + 3] = torch.cat([step_unit, base, zero_unit], 1)


def _ratio(x: Tensor, unit: Tensor) -> Tensor:
    """X / unit, 0 where the unit is 0 (a constant row)."""
    return torch.where(unit > 0, x / unit, torch.zeros_like(x))


def _dequantise(arrays: dict[str, Tensor], name: str, header: Tensor) -> Tensor:
    """[M, A, B] float32; inverse of `_quantise_into`; header [M, 3]."""
    step_unit, base, zero_unit = (column[:, None] for column in header.unbind(1))
    step = arrays[f"{name}_scale"].float() * step_unit
    zero = base + arrays[f"{name}_zero"].float() * zero_unit
    codes = arrays[f"{name}_codes"]
    width = arrays["k_scale" if name == "v" else "v_scale"].shape[1]
    if codes.shape[2] != width:  # two a byte: element i in the low half, i + width / 2 in the high half
        codes = torch.cat([codes & 15, codes >> 4], 2)
    return zero[..., None] + codes.float() * step[..., None]
