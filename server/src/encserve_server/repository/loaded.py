"""What loading a bundle gives, before it is put behind a scheduler or used in this process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from encserve_server.engine.base import Engine, Inspector
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.outputs import ModelOutputs
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.settings import Settings
from encserve_server.types.bundles import Bundle
from encserve_server.types.requests import Task


class ServedAlready(Exception):
    """A bundle is the one that is served: its folder was touched, or copied back."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has been verified, loaded and warmed up.

    Attributes:
        bundle: What it is.
        tokenizer: Its tokenizer, or None where it takes ids only.
        outputs: What can be made of a sequence.
        engine: What runs it.
        load_seconds: The time to verify and load it.
        warmup_seconds: The time to warm it up.
        load_inspector: Loads what looks into it; None where its bundle has no graph for that.
        max_batch_tokens: The budget of padded tokens in a batch; None for the settings' own.
        job_batch_tokens: The same for a job, which no caller waits for.
        static_tokenizers: The tokenizers of tasks whose sparse weights take no run.
    """

    bundle: Bundle
    tokenizer: TextTokenizer | None
    outputs: ModelOutputs
    engine: Engine
    load_seconds: float
    warmup_seconds: float
    load_inspector: Callable[[], Inspector] | None = None
    max_batch_tokens: int | None = None
    job_batch_tokens: int | None = None
    static_tokenizers: Mapping[Task, TextTokenizer] = field(default_factory=dict)


def batch_policy(settings: Settings, device: str, max_batch_tokens: int | None = None) -> BatchPolicy:
    """The bounds of a batch on "cpu" or "cuda", with a budget or with the device's own."""
    return BatchPolicy(
        max_batch_tokens=max_batch_tokens or settings.batch_tokens_for(device),
        max_batch_sequences=settings.max_batch_sequences,
        max_padding_fraction=settings.padding_fraction_for(device),
    )
