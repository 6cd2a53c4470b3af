"""Puts a loaded model behind a scheduler of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from encserve_server.engine.base import Engine, Inspector
from encserve_server.models.inspecting import InspectLane
from encserve_server.models.served import RequestLimits, ServedModel
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.outputs import ModelOutputs
from encserve_server.scheduling.batching import BatchPolicy
from encserve_server.scheduling.scheduler import Scheduler, SchedulerLimits
from encserve_server.settings import MIB, Settings
from encserve_server.system.clock import Clock
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Tracer
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
    static_tokenizers: Mapping[Task, TextTokenizer] = field(default_factory=dict)


def batch_policy(settings: Settings, device: str, max_batch_tokens: int | None = None) -> BatchPolicy:
    """The bounds of a batch on "cpu" or "cuda", with a budget or with the device's own."""
    return BatchPolicy(
        max_batch_tokens=max_batch_tokens or settings.batch_tokens_for(device),
        max_batch_sequences=settings.max_batch_sequences,
        max_padding_fraction=settings.padding_fraction_for(device),
    )


def serve_model(
    loaded: LoadedModel,
    settings: Settings,
    metrics: Metrics,
    *,
    clock: Clock,
    on_health_change: Callable[[], None],
    tracer: Tracer | None = None,
) -> ServedModel:
    """Starts a model's scheduler, and gives what takes calls. To be called on the event loop."""
    bundle, info = loaded.bundle, loaded.engine.info
    own = metrics.for_model(bundle.name, bundle.version)
    own.load_seconds.set(loaded.load_seconds)
    own.warmup_seconds.set(loaded.warmup_seconds)
    own.queue_limit_tokens.set(settings.max_queue_tokens)
    policy = batch_policy(settings, info.device, loaded.max_batch_tokens)
    own.batch_limit_tokens.set(policy.max_batch_tokens)
    own.describe(
        fingerprint=bundle.fingerprint,
        precision=info.precision,
        provider=info.provider,
        device=info.device,
        requested_device=settings.device,
        runtime=info.runtime,
    )
    scheduler = Scheduler(
        loaded.engine,
        loaded.outputs.compute,
        policy,
        SchedulerLimits(max_queue_tokens=settings.max_queue_tokens, stall_seconds=settings.stall_seconds),
        clock=clock,
        observer=own,
        on_health_change=on_health_change,
        probe=bundle.sample(1),
        tracer=None if tracer is None else tracer.for_model(bundle.name, bundle.version),
    )
    scheduler.start()
    lane = None
    if settings.inspect and loaded.load_inspector is not None:
        lane = InspectLane(loaded.load_inspector, settings.max_inspections, own)
    return ServedModel(
        bundle,
        loaded.tokenizer,
        loaded.outputs,
        scheduler,
        info,
        _request_limits(settings),
        clock=clock,
        observer=own,
        inspect_lane=lane,
        max_batch_tokens=policy.max_batch_tokens,
        static_tokenizers=loaded.static_tokenizers,
    )


def _request_limits(settings: Settings) -> RequestLimits:
    return RequestLimits(
        max_sequences=settings.max_request_sequences,
        max_text_bytes=settings.max_text_bytes,
        max_request_bytes=settings.max_request_mib * MIB,
        max_response_bytes=settings.max_response_mib * MIB,
        max_tokens=settings.max_queue_tokens,
        max_inspect_tokens=settings.max_inspect_tokens,
    )
