"""Any Hugging Face causal decoder as a `Decoder`: transformers runs everything but attention.

decoder = load("path/of/a/model", dtype="bfloat16")
logits = decoder.forward(tokens, positions, attend)
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from testbed.models import probe
from testbed.models.base import Attend, Geometry, Logits, ModelError, Watch
from testbed.models.interface import handling, switch, watching
from testbed.models.lean import LeanLlama

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
SAMPLED = 1024  # numbers of each weight that a fingerprint looks at
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class HfDecoder:
    """A `Decoder` around a transformers model that was switched to our attention interface."""

    def __init__(self, model: Any, geometry: Geometry, tokenizer: Any, name: str) -> None:
        self.model = model
        self.geometry = geometry
        self.tokenizer = tokenizer
        self.name = name
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.weights = sum(weight.numel() for weight in model.parameters())
        self.lean: LeanLlama | None = None  # the faster way, where there is one
        self._fingerprint = ""
        self._takes_positions = "position_ids" in signature(model.forward).parameters

    @property
    def weights_bytes(self) -> int:
        """See `Decoder.weights_bytes`."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    @property
    def width(self) -> int:
        """See `Decoder.width`."""
        return self.model.get_input_embeddings().embedding_dim

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Decoder.embed`."""
        with torch.no_grad():
            return self.model.get_input_embeddings()(tokens).to(self.dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits: Logits = "last",
        watch: Watch | None = None,
    ) -> Tensor | None:
        """See `Decoder.forward`."""
        if tokens.dim() != 2 or tokens.shape != positions.shape:
            raise ModelError(f"tokens {tuple(tokens.shape)} and positions {tuple(positions.shape)} must both be [B, T]")

        if self.lean is not None:
            with torch.no_grad():
                return self.lean.run(tokens, positions, attend, logits, watch)

        def handler(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None, _options: Mapping[str, Any]
        ) -> Tensor:
            return attend(module.testbed_layer, q, k, v)  # pyright: ignore[reportArgumentType]

        with torch.no_grad(), handling(handler), watching(self.model, watch):
            return self._run(tokens, positions, logits)

    def _run(self, tokens: Tensor, positions: Tensor, logits: Logits) -> Tensor | None:
        inputs = {"input_ids": tokens, "use_cache": False}
        if self._takes_positions:
            inputs["position_ids"] = positions
        if logits == "none":
            self.model.base_model(**inputs)
            return None
        return self.model(**inputs, logits_to_keep=1 if logits == "last" else 0).logits.float()

    @property
    def fingerprint(self) -> str:
        """See `Decoder.fingerprint`: `SAMPLED` numbers of every tensor, evenly spread; looked at once."""
        if not self._fingerprint:
            self._fingerprint = self._sample_weights()
        return self._fingerprint

    def _sample_weights(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for name, weight in self.model.state_dict().items():
            flat = weight.detach().flatten()
            sample = flat[:: max(1, len(flat) // SAMPLED)].to("cpu", torch.float32)
            digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
        return digest.hexdigest()

    @property
    def batches(self) -> bool:
        """See `Decoder.batches`: transformers' own products of matrices mix rows in their last bits."""
        return self.lean is not None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ids = self._special("eos_token_id")
        return frozenset(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text."""
        return self._special("bos_token_id")

    def _special(self, key: str) -> Any:
        generation = getattr(self.model, "generation_config", None)
        found = getattr(generation, key, None)
        return found if found is not None else getattr(self.model.config, key, None)

    def encode(self, text: str) -> list[int]:
        """Token ids, no special tokens added."""
        return self._need_tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens left out."""
        return self._need_tokenizer().decode(list(ids), skip_special_tokens=True)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ModelError(
                f"model {self.name} has no tokenizer: its folder needs one of {', '.join(_TOKENIZER_FILES)}"
            )
        return self.tokenizer


def wrap(model: Any, tokenizer: Any = None, name: str | None = None) -> HfDecoder:
    """A transformers model as a decoder.

    The model is changed in place: its attention is ours from now on, and float32 weights that are bf16 numbers may be
    kept in bf16 (`LeanLlama`).

    Args:
        model: a causal language model of transformers (PreTrainedModel with a head).
        tokenizer: of transformers, or None if no text is needed.
        name: for records; default the model's own.

    Raises:
        ModelError: a kind of model that is not supported.
    """
    config = model.config.get_text_config()
    called = str(name or model.config.name_or_path or model.config.model_type)
    _check_kind(called, model.config)
    model.eval().requires_grad_(False)
    tokens = probe.probe_tokens(config.vocab_size, model.device)
    with torch.no_grad():
        truth = model(input_ids=tokens, use_cache=False).logits
        switch(model)
        calls = probe.record(lambda: model(input_ids=tokens[:, :1], use_cache=False))
    geometry = probe.geometry(called, config, calls, vocab=truth.shape[-1])
    decoder = HfDecoder(model, geometry, tokenizer, called)
    if LeanLlama.fits(model):
        decoder.lean = LeanLlama(model, geometry)
        if probe.error(decoder, tokens, truth) is None:
            return decoder
        decoder.lean = None  # a module was changed by its owner: take transformers' own way
        model.to(decoder.dtype)
    problem = probe.error(decoder, tokens, truth)
    if problem is not None:
        raise probe.refuse(called, problem)
    return decoder


def _check_kind(name: str, config: Any) -> None:
    """Refuses by configuration what would not even load or run as a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.is_encoder_decoder:
        raise probe.refuse(name, f"{config.model_type!r} is an encoder-decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise probe.refuse(name, f"{config.model_type!r} is no causal language model")


def load(
    path: str | Path, dtype: str = "float32", device: str = "cpu", name: str | None = None, tokenizer: bool = True
) -> HfDecoder:
    """Loads a model folder in transformers' format (or `owner/name` on the hub) as a decoder.

    Args:
        path: the folder.
        dtype: float32, bfloat16 or float16, of weights and of q, k, v.
        device: cpu, cuda, cuda:0, or auto (cuda where there is one).
        name: for records; default the folder's name.
        tokenizer: load it too, where the folder has one.

    Raises:
        ModelError: unreadable folder, missing weights, unknown dtype or device, unsupported kind of model.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"model.dtype={dtype!r}: must be one of {', '.join(_DTYPES)}")
    target = _device(device)
    source = str(path)
    if not Path(source).is_dir() and (Path(source).exists() or not _HUB_NAME.fullmatch(source)):
        raise ModelError(f"model.path={source!r}: no such folder")
    name = name or Path(source).name
    with _errors_of(source):
        model = _read(name, source, _DTYPES[dtype])
        reader = _read_tokenizer(source) if tokenizer else None
    decoder = wrap(model.to(target), reader, name)
    del model
    _give_back_freed_memory()
    return decoder


def _give_back_freed_memory() -> None:
    """Glibc keeps what loading freed, about as much as the weights, in the process: hand it to the system."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"model.device={device!r}: must be cpu, cuda, cuda:<index> or auto") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device={device!r}: this machine has no CUDA device; use cpu or auto")
    return target


@contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """Turns what reading a folder may raise into one error that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, ImportError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(f"model.path={source!r}: can't be loaded: {first}") from error


def _read(name: str, source: str, dtype: torch.dtype) -> Any:
    """The model, every weight of it from the files."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    _check_kind(name, AutoConfig.from_pretrained(source))
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
        model, info = loaded
    finally:
        if bars:
            logging.enable_progress_bar()
    # transformers fills what is missing with random numbers and only warns.
    wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise ModelError(f"model.path={source!r}: {len(wrong)} weights are missing or misshapen, first {wrong[0]}")
    return model


def _read_tokenizer(source: str) -> Any:
    """The folder's tokenizer, None if it has none."""
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(source)
