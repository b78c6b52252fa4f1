"""A tiny random model with a tokenizer and a text of its own, and the real command run on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
import warm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_model(folder: Path, positions: int = 1024) -> None:
    """A byte-level llama: every byte of a text is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: at for at, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)


def save_text(folder: Path) -> None:
    folder.mkdir()
    for name in range(6):
        sentences = (f"Sentence {at} of text {name} says nothing at all." for at in range(60))
        (folder / f"{name}.txt").write_text(" ".join(sentences))


@dataclass(frozen=True)
class Place:
    """Where the model, the text and the caches of these tests are."""

    root: Path

    @property
    def overrides(self) -> list[str]:
        return [
            "policy=streaming",
            "budget.fraction=0.5",
            "model=hf",
            f"model.path={self.root / 'model'}",
            "model.device=cpu",
            f"workload.text={self.root / 'text'}",
            "workload.lengths=[300]",
            "workload.depths=[0.5]",
            "workload.needles_per_context=1",
            "workload.max_new_tokens=4",
            "wandb=disabled",
            "twin=[h200]",
        ]

    def changed(self, *more: str) -> list[str]:
        """The overrides, some replaced and more added."""
        given = {override.partition("=")[0] for override in more}
        return [*(each for each in self.overrides if each.partition("=")[0] not in given), *more]

    def run(self, folder: Path, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """The real command on the tiny model, to its end."""
        return finish(start(folder, *self.changed(*more), **options))


def arguments(folder: Path, *overrides: str, flags: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Of the real command, and its environment; one run goes to `folder`, a sweep (flags=["-m"]) below it."""
    dirs = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return ["-m", "testbed.run", *flags, *overrides, *dirs], environment


def start(folder: Path, *overrides: str, flags: Sequence[str] = (), **options: Any) -> warm.Process:
    """The real command, in a process that has imported what is not ours."""
    command, environment = arguments(folder, *overrides, flags=flags)
    return warm.start(command, env=environment, **options)


def start_cold(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """The real command as a user starts it."""
    command, environment = arguments(folder, *overrides)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *command], env=environment, text=True, stdout=pipe, stderr=pipe)


def finish(process: warm.Process | subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, said = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.wait(), out, said)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr that are not the plain progress."""
    return [line for line in done.stderr.splitlines() if not line.endswith(" ...")]


def left_behind(folder: Path) -> Sequence[str]:
    """Files of a run folder, Hydra's own left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".hydra" not in path.parts)
    return sorted(str(path.relative_to(folder)) for path in files)
