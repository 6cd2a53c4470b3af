"""A loaded model. The server gives it a scheduler; an `Embedder` uses it directly."""

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
    """The bundle is already served. Its folder was only touched or copied again."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has been verified, loaded and warmed up.

    Attributes:
        bundle: The bundle.
        tokenizer: The model's tokenizer; None if the model has none.
        outputs: The outputs that the model can compute.
        engine: Runs the model.
        load_seconds: The time to verify and load the model.
        warmup_seconds: The time to warm up the model.
        load_inspector: Loads the graph for inspections; None if the bundle has no such graph.
        max_batch_tokens: The maximum number of tokens in a batch, padding included; None for the value in the settings.
        job_batch_tokens: The same for a job. For a job, latency does not matter.
        static_tokenizers: The tokenizers of tasks whose sparse weights come from a table.
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
    """Return the limits of a batch on "cpu" or "cuda". `max_batch_tokens` replaces the value in the settings."""
    return BatchPolicy(
        max_batch_tokens=max_batch_tokens or settings.batch_tokens_for(device),
        max_batch_sequences=settings.max_batch_sequences,
        max_padding_fraction=settings.padding_fraction_for(device),
    )
