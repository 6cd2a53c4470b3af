"""Turns a loaded model into a served model, with its own scheduler."""

from collections.abc import Callable

from encserve_server.models.inspecting import InspectLane
from encserve_server.models.served import RequestLimits, ServedModel
from encserve_server.repository.loaded import LoadedModel, batch_policy
from encserve_server.scheduling.scheduler import Scheduler, SchedulerLimits
from encserve_server.settings import MIB, Settings
from encserve_server.system.clock import Clock
from encserve_server.telemetry.metrics import Metrics
from encserve_server.telemetry.spans import Tracer


def serve_model(
    loaded: LoadedModel,
    settings: Settings,
    metrics: Metrics,
    *,
    clock: Clock,
    on_health_change: Callable[[], None],
    tracer: Tracer | None = None,
) -> ServedModel:
    """Start a model's scheduler and return the served model. Call it on the event loop."""
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
