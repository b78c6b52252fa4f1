"""The seeded bugs. Anchors are short and sit on one line, so that a change of layout does not make them stale."""

from __future__ import annotations

from dataclasses import dataclass

EXACT = "tests/kernels/test_exactness.py::test_every_mode"
INT4, INT8 = f"{EXACT}[int4-64-16]", f"{EXACT}[int8-80-32]"
BLOCKS = "tests/kernels/test_exactness.py::test_a_stream_of_many_blocks"
TRITON = "tests/kernels/test_exactness.py::test_every_mode_in_triton"
HALF_STEP = "tests/kernels/test_pages.py::test_no_element_is_off_by_more_than_half_a_step"
UPKEEP = "tests/kernels/test_upkeep.py::test_equal_to_doing_it_one_by_one"
TRANSCODE = "tests/kernels/test_transcode.py::test_equals_decode_and_encode"
MANY_PAGES = "tests/kernels/test_scoring.py::test_the_best_of_many_pages"
BOUNDS = "tests/kernels/test_scoring.py::test_the_bound_holds_for_every_key"


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        name: of the test and the copy's folder.
        file: where, as a pattern below the repository's root.
        old: text that occurs exactly once in all files of that pattern.
        new: what it becomes.
        tests: that must catch it.
        interp: whether they need Triton's interpreter.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    interp: bool = False


NATIVE = "kernels/cpu/*"
TORCH = "kernels/torch_backend.py"
PAGES = "kernels/pages.py"
GPU = "kernels/gpu/*.py"

MUTANTS = (
    # Native attention.
    Mutant("native-wrong-scale", NATIVE, "factor = a.scale * 1.4426950408889634f;", "factor = a.scale;", (INT4,)),
    Mutant("native-mask-shifted", NATIVE, "return position <= own[r] &&", "return position < own[r] &&", (INT4,)),
    Mutant("native-split-dropped", NATIVE, "used = splits_of(a, a.count[s]);",
           "used = std::max<int64_t>(1, splits_of(a, a.count[s]) - 1);", (INT4,)),
    Mutant("native-row-unwritten", NATIVE, "row < rows; ++row) merge_row", "row + 1 < rows; ++row) merge_row", (INT4,)),
    Mutant("native-log-count-missing", NATIVE, "= a[r] + one.log2_count;", "= a[r];", (INT4,)),
    # Native pages and writes.
    Mutant(
        "native-zero-point-of-keys", "kernels/cpu/pages.h", "splat(header[5]) + splat(header[4])",
        "splat(header[5]) + splat(header[1])", (INT4,),
    ),
    Mutant("native-stale-bound", "kernels/cpu/store.cpp", "x[i] > old[i] ? x[i] : old[i]", "old[i]", (UPKEEP,)),
    Mutant(
        "native-nibbles-swapped", "kernels/cpu/store.cpp", "row[b] | (uint8_t)(row[b + B / 2] << 4)",
        "row[b + B / 2] | (uint8_t)(row[b] << 4)", (HALF_STEP,),
    ),
    Mutant("native-ties-to-any", "kernels/cpu/score.cpp", "(tie && ties > 0)", "tie", (MANY_PAGES,)),
    # The portable backend.
    Mutant("torch-log-count-missing", TORCH, '= views(source.fmt, blobs)["log2_count"]', "= 0.0", (INT4,)),
    Mutant(
        "torch-sinks-ignored", TORCH, "(position < options.sink_tokens) | (window == 0)", "(window == 0)", (INT4,)
    ),
    Mutant("torch-window-of-stream-0", TORCH, "window[:, None, None]", "window[:1, None, None]", (INT4,)),
    Mutant("torch-mass-of-blocks-not-joined", TORCH, "part.mass * share[..., None]", "part.mass * 1.0", (BLOCKS,)),
    Mutant("torch-mass-not-normalised", TORCH, ".flatten(1, 2).mean(1))", ".flatten(1, 2).sum(1))", (INT4,)),
    Mutant("torch-unwritten-slots-read", TORCH, "torch.where(seen, self.v, 0.0)", "self.v", (INT4,)),
    Mutant("torch-slab-off-by-one", TORCH, "low = j * source.slab_pages", "low = j * (source.slab_pages - 1)", (INT4,)),
    Mutant(
        "torch-heads-swapped", TORCH, "(q.flatten(1, 2) @ keys", "(q.flip(1).flatten(1, 2) @ keys", (INT4,)
    ),
    # Pages, merge, scores, approximations.
    Mutant("pages-step-too-small", PAGES, "step_unit).ceil()", "step_unit).floor()", (HALF_STEP,)),
    Mutant("pages-zero-point-too-high", PAGES, "zero_unit).floor()", "zero_unit).ceil()", (HALF_STEP,)),
    Mutant("pages-nibbles-swapped", PAGES, "[codes & 15, codes >> 4]", "[codes >> 4, codes & 15]", (TRANSCODE,)),
    Mutant(
        "merge-weights-not-normalised", "kernels/state.py", "0.0, weight / total)", "0.0, weight)",
        ("tests/kernels/test_state.py::test_closed_form",),
    ),
    Mutant(
        "merge-of-empty-rows", "kernels/state.py", "lse - torch.where(top == -math.inf, 0.0, top)", "lse - top",
        ("tests/kernels/test_state.py::test_empty_parts_count_for_nothing_even_if_they_hold_nan",),
    ),
    Mutant("scoring-bound-from-below", "kernels/scoring.py", "[rows.clamp(min=0), rows.clamp(max=0)]",
           "[rows.clamp(max=0), rows.clamp(min=0)]", (BOUNDS,)),
    Mutant("prototype-count-not-log", "kernels/prototypes.py", "count.log2()", "count",
           ("tests/kernels/test_prototypes.py::test_prototypes_count_valid_tokens_only",)),
    Mutant("linear-old-tokens-not-rescaled", "kernels/linear_attention.py", "state.s.mul_(shrink[..., None]).",
           "state.s.", ("tests/kernels/test_linear_attention.py::test_logits_of_eighty_neither_overflow_nor_vanish",)),
    # Triton, in the interpreter.
    Mutant("triton-mask-shifted", GPU, "position[None, :] <= own[:, None]", "position[None, :] < own[:, None]",
           (f"{TRITON}[exact-64-16]",), True),
    Mutant("triton-window-of-stream-0", GPU, "tl.load(windows + stream)", "tl.load(windows)",
           (f"{TRITON}[window-64-16]",), True),
    Mutant("triton-zero-point-dropped", GPU, "+ middle[:, None]) * scale", ") * scale", (f"{TRITON}[exact-80-32]",),
           True),
    Mutant("triton-heads-swapped", GPU, "stream * q_stream_stride + g.to(tl.int64) *",
           "stream * q_stream_stride + (rows // tokens - 1 - g).to(tl.int64) *", (f"{TRITON}[exact-64-16]",), True),
    Mutant("triton-log-count-missing", GPU, "* scale + bias[None, :]", "* scale", (f"{TRITON}[cluster-64-16]",), True),
    Mutant("triton-older-tiles-not-rescaled", GPU, "result = result * decay[:, None]", "pass",
           (f"{TRITON}[exact-128-64]",), True),
)  # fmt: skip
