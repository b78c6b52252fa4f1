"""What a core-token predictor learns from: features of pages before a step, and what the step then attended to.

Real sessions are driven over the corpus (`testbed.predictor.drive`); at each step of a window some heads are written
down, one row a head, both under the full cache and where only a small share of the pages is attended. Once in every
second window all heads are, with each page's contribution to the next logit. Rows are kept in
$TESTBED_CACHE/recordings, a file for each document, by a hash of the corpus, the settings, the model and the code that
makes the features; an interrupted recording goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from policies.base import Predictor
from policies.predictors.from_signal import FromSignal
from testbed.assets import cache_dir
from testbed.code import code_of
from testbed.engine.session import Session
from testbed.engine.signals import Observed
from testbed.engine.signals.core import LIGHT, NAMES
from testbed.heads.differentiable import Differentiable
from testbed.models.base import Decoder
from testbed.predictor.contribution import contributions, step_of
from testbed.predictor.corpus import Document, corpus_hash
from testbed.predictor.drive import Course, Learn, Moment, drive
from testbed.predictor.recall import caught
from testbed.tensors import write_tensors

SCHEMA = 1
SINGLES = {
    "attention_ema": "attention_ema",
    "bm25": "retrieval",
    "h2o": "attention_mass",
    "quest": "query_bound",
    "snapkv": "window_mass",
    "tova": "last_mass",
}
"""Predictors that are one signal, and which; the learned one has to beat the best of them."""
FEATURES = {"core_score": NAMES, "core_score_light": LIGHT}
"""Signals that read trained weights, and the features of those."""
SIGNALS = "testbed.engine.signals"
LARGEST = 60_000.0  # features are kept in float16
Progress = Callable[[str, float], None]


class RecordingError(ValueError):
    """A recording that can't be made or read."""


class FeatureSource(Protocol):
    """A signal source that describes pages to the learned predictor; see `testbed.engine.signals.core`."""

    @property
    def names(self) -> tuple[str, ...]:
        """F names."""
        ...

    def features(self, observed: Observed) -> Tensor:
        """[L, Hk, N, F] float32."""
        ...

    def context(self) -> Tensor:
        """[groups, C'] of the coming token, float32."""
        ...


@dataclass(frozen=True)
class RecordingSettings:
    """How much is written down.

    Attributes:
        source: the signal whose source makes the features; it is asked for no value.
        heads_one_in: at each step one in so many heads is written down, other ones at the next step.
        points: of the integration of contributions; 0 = none are computed.
        chooser: predictor whose best pages the sparse sessions attend to.
    """

    source: str = "core_score"
    heads_one_in: int = 9
    points: int = 8
    chooser: Predictor = FromSignal("query_bound")

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key, least in (("heads_one_in", 1), ("points", 0)):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RecordingError(f"recording.{key}={value!r}: must be a whole number of at least {least}")


@dataclass(frozen=True)
class Recording:
    """M rows of one document: one row is one head at one step. Pages after the newest are no candidates.

    Attributes:
        document, kind, part: whose.
        names: F names of the features.
        features: [M, N, F] float16.
        contexts: [U, groups, C'] float16, of each step written down.
        moment: [M] int64, index into contexts.
        head: [M] int64, layer * Hk + KV head.
        mass: [M, N] float16, share of the step's attention under the full cache; 0 for pages that are no candidates.
        candidate: [M, N] bool, pages a policy chooses among.
        contribution: [M, N] bfloat16, logit units; zeros where `has_contribution` is false.
        has_contribution: [M] bool.
        phase: [M] int64, index into `PHASES`, of the token that the step predicts.
        share: [M] float32, of the candidates that the session attended to; 1 = the full cache.
        at: [M] int64, position of the step's token.
        recall: predictor -> [M, K] float32 for `SHARES`, NaN where candidates hold no mass.
    """

    document: str
    kind: str
    part: str
    names: tuple[str, ...]
    features: Tensor
    contexts: Tensor
    moment: Tensor
    head: Tensor
    mass: Tensor
    candidate: Tensor
    contribution: Tensor
    has_contribution: Tensor
    phase: Tensor
    share: Tensor
    at: Tensor
    recall: dict[str, Tensor]

    def __post_init__(self) -> None:
        """Refuses tensors of other types or numbers of rows and numbers that are none."""
        for key in ("moment", "head", "phase", "at", "candidate", "has_contribution"):
            wanted = torch.bool if key in ("candidate", "has_contribution") else torch.int64
            if getattr(self, key).dtype != wanted:
                raise RecordingError(f"recording {self.document}: {key} is {getattr(self, key).dtype}, no {wanted}")
        for key in ("moment", "head", "mass", "candidate", "contribution", "has_contribution", "phase", "share", "at"):
            if len(getattr(self, key)) != len(self.features):
                raise RecordingError(f"recording {self.document}: {key} has {len(getattr(self, key))} rows")
        for key in ("features", "contexts", "mass", "contribution"):
            if not getattr(self, key).is_floating_point():
                raise RecordingError(f"recording {self.document}: {key} is {getattr(self, key).dtype}, no float type")
            if not bool(torch.isfinite(getattr(self, key)).all()):
                raise RecordingError(f"recording {self.document}: {key} holds numbers that are not finite")

    @property
    def rows(self) -> int:
        """M."""
        return len(self.features)

    def of(self, names: Sequence[str]) -> Recording:
        """The same with some of the features only, in the order of names; with all of them nothing is copied."""
        if tuple(names) == self.names:
            return self
        columns = [self.names.index(name) for name in names]
        return replace(self, names=tuple(names), features=self.features[..., columns])

    def _tensors(self) -> dict[str, Tensor]:
        plain = {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}
        return plain | {f"recall.{name}": value for name, value in self.recall.items()}

    def write(self, path: Path) -> None:
        """To a file, whole or not at all."""
        about = {key: getattr(self, key) for key in ("document", "kind", "part", "names")}
        write_tensors(path, self._tensors(), {"about": json.dumps({**about, "schema": SCHEMA})})

    @staticmethod
    def read(path: Path) -> Recording:
        """From a file.

        Raises:
            RecordingError: not a recording of this version.
        """
        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["about"])
                if about.pop("schema") != SCHEMA:
                    raise RecordingError("of another version")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no dict
            recall = {key[7:]: tensors.pop(key) for key in list(tensors) if key.startswith("recall.")}
            return Recording(**{**about, "names": tuple(about["names"])}, **tensors, recall=recall)
        except (OSError, SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise RecordingError(f"{path}: not a recording ({error}); delete the file to have it made again") from error


def record(
    decoder: Decoder,
    corpus: Sequence[Document],
    settings: RecordingSettings,
    course: Course | None = None,
    progress: Progress = lambda what, done: None,
) -> list[Recording]:
    """The corpus's recordings, in its order: read if they were made before, else made and kept.

    Args:
        decoder: the model.
        corpus: what is run; all of it counts for the hash that recordings are kept by.
        settings: how much is written down.
        course: how sessions are driven, None = as `settings` says and otherwise by default.
        progress: called with the share that is done.
    """
    course = course or Course(settings.chooser)
    course = replace(course, watch=course.watch | set(SINGLES.values()), beside=frozenset({settings.source}))
    folder = recordings_folder(decoder, corpus, settings, course)
    model = Differentiable(decoder) if settings.points else None
    out: list[Recording] = []
    for index, document in enumerate(corpus):
        path = folder / f"{index:02}-{Path(document.name).stem}.safetensors"
        if not path.exists():
            progress(f"recording {document.name} ({index + 1} of {len(corpus)})", index / len(corpus))
            record_document(document, decoder, settings, course, model).write(path)
        out.append(Recording.read(path))
    progress("recorded", 1.0)
    return out


def recordings_folder(
    decoder: Decoder, corpus: Sequence[Document], settings: RecordingSettings, course: Course
) -> Path:
    """Where they are kept: another folder for other documents, weights, settings or code of the features' signals.

    Other code, as of kernels or of how sessions are driven, is not looked at: after such a change delete the folder.
    """
    what = (SCHEMA, corpus_hash(corpus), decoder.fingerprint, repr(settings), course.shares, asdict(course.cache))
    digest = hashlib.blake2b(repr((*what, dict(course.signals), _code(settings.source))).encode(), digest_size=8)
    return cache_dir() / "recordings" / f"{decoder.name.replace('/', '_')}-{digest.hexdigest()}"


def data_hash(decoder: Decoder, corpus: Sequence[Document], settings: RecordingSettings, course: Course) -> str:
    """Of all that the recordings depend on; trained weights name it."""
    return recordings_folder(decoder, corpus, settings, course).name.rsplit("-", 1)[-1]


def _code(source: str) -> str:
    """Of the signal that makes the features: changed features are recorded anew."""
    text = (resources.files("conf") / "signal" / f"{source}.yaml").read_text()
    target: str = OmegaConf.select(OmegaConf.create(text), "_target_")
    return text + code_of(target.rpartition(".")[0], SIGNALS)


def record_document(
    document: Document, decoder: Decoder, settings: RecordingSettings, course: Course, model: Differentiable | None
) -> Recording:
    """Drives one document and writes rows down."""
    rows = _Rows(document, settings, model)
    drive(document, decoder, course, rows.visit, remember=model is not None)
    return rows.recording()


class _Rows:
    """Collects the rows of one document."""

    def __init__(self, document: Document, settings: RecordingSettings, model: Differentiable | None) -> None:
        self.document, self.settings, self.model = document, settings, model
        self.names: tuple[str, ...] = ()
        self.contexts: list[Tensor] = []
        self.parts: list[dict[str, Tensor]] = []
        self.recalls: dict[str, list[Tensor]] = {name: [] for name in SINGLES}

    def visit(self, moment: Moment) -> Learn:
        """Takes features and the others' scores before the step; the truth completes the rows."""
        source = feature_source(moment.session, self.settings.source)
        self.names = source.names
        heads = self._heads(moment)
        shape = moment.signals.shape
        observed = moment.session.observed(shape[2])
        features = source.features(observed).flatten(0, 1)[heads].clamp(-LARGEST, LARGEST).half()
        context = source.context().clamp(-LARGEST, LARGEST).half()
        scores = {name: moment.signals[signal].expand(shape).flatten(0, 1)[heads] for name, signal in SINGLES.items()}
        candidate = moment.candidates

        def learn(truth: Tensor) -> None:
            mass = truth.flatten(0, 1)[heads]
            for name, score in scores.items():
                self.recalls[name].append(caught(score, mass, candidate).recall.float())
            gains = None
            if self.model is not None and self._all_heads(moment):
                gains = contributions(self.model, step_of(moment), self.settings.points).value.flatten(0, 1)
            self._add(moment, heads, features, mass * candidate, candidate, gains)

        self.contexts.append(context)
        return learn

    def _all_heads(self, moment: Moment) -> bool:
        """Whether contributions are computed: in the middle of every second window, under the full cache."""
        begin, end = self.document.windows[moment.window]
        here = moment.window % 2 == 0 and moment.at == (begin + end) // 2
        return here and self.model is not None and moment.memory is not None

    def _heads(self, moment: Moment) -> Tensor:
        count = moment.signals.shape[0] * moment.signals.shape[1]
        if self._all_heads(moment):
            return torch.arange(count)
        every = min(self.settings.heads_one_in, count)
        return torch.arange(len(self.contexts) % every, count, every)

    def _add(
        self, moment: Moment, heads: Tensor, features: Tensor, mass: Tensor, candidate: Tensor, gains: Tensor | None
    ) -> None:
        rows = len(heads)
        many = {
            "moment": len(self.contexts) - 1,
            "phase": moment.phase,
            "at": moment.at,
        }
        self.parts.append(
            {key: torch.full((rows,), value) for key, value in many.items()}
            | {
                "head": heads,
                "share": torch.full((rows,), 1.0 if moment.share is None else moment.share),
                "has_contribution": torch.full((rows,), gains is not None),
                "features": features,
                "mass": mass.half(),
                "candidate": candidate.expand(rows, -1),
                "contribution": torch.zeros_like(mass).bfloat16() if gains is None else gains.bfloat16(),
            }
        )

    def recording(self) -> Recording:
        """All rows, padded to the pages of the last."""
        pages = max(part["mass"].shape[1] for part in self.parts)
        tensors = {key: torch.cat([_padded(part[key], pages) for part in self.parts]) for key in self.parts[0]}
        return Recording(
            document=self.document.name,
            kind=self.document.kind,
            part=self.document.part,
            names=self.names,
            contexts=torch.stack(self.contexts),
            recall={name: torch.cat(found) for name, found in self.recalls.items()},
            **cast(dict[str, Any], tensors),
        )


def _padded(x: Tensor, pages: int) -> Tensor:
    """[M, n, ...] with zeros up to N pages; [M] as it is."""
    if x.dim() == 1:
        return x
    more = torch.zeros((x.shape[0], pages - x.shape[1], *x.shape[2:]), dtype=x.dtype)
    return torch.cat((x, more), 1)


def feature_source(session: Session, name: str) -> FeatureSource:
    """The session's source that describes pages.

    Raises:
        RecordingError: the signal's source describes none.
    """
    source: Any = session.sources[name]
    if not all(hasattr(source, key) for key in ("names", "features", "context")):
        raise RecordingError(f"recording.source={name!r}: must be a signal whose source describes pages")
    return source
