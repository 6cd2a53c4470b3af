"""The methods that gRPC and HTTP share: readiness, descriptions of models, statistics, and inference.

Methods return protobuf messages. HTTP writes these messages as JSON.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from encserve import __version__
from encserve_server.calls import Call
from encserve_server.endpoints.host import Host
from encserve_server.errors import DeadlineExpired, InvalidField, ModelNotFound, NotReady
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.protocols.open_inference.requests import (
    InferCall,
    SentRequest,
    check_length,
    decode_call,
    decode_request,
)
from encserve_server.protocols.open_inference.tensors import CONFIG_TYPES, TensorKind, inputs_of, outputs_of
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as pb
from encserve_server.protocols.open_inference.triton import model_config_pb2 as config_pb

_PLATFORM = "encserve"
_EXTENSIONS = ("model_configuration", "statistics")
# The reply and traces contain the request's id, so its length is bounded.
_MAX_ID_CHARS = 1024

Build = Callable[[ServedModel, InferCall, EncodeReply], bytes]


@dataclass(slots=True)
class Spent:
    """A number of calls, and their total duration."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one more call and its duration."""
        self.count += 1
        self.seconds += seconds

    @property
    def ns(self) -> int:
        """The total duration in nanoseconds."""
        return round(self.seconds * 1e9)


@dataclass(slots=True)
class Statistics:
    """Durations of this protocol's calls for one model; owned by the event loop.

    Attributes:
        success: The time of successful calls, from arrival to reply.
        fail: The time of failed calls.
        queue: The time in the queue. For each call, this is the longest wait of a sequence.
        compute_input: The time in the tokenizer.
        compute_infer: The time in the model. For each call, this is the longest run of a batch with the call's
            sequences.
        compute_output: The time for building the reply.
        last_at_ms: The time of the last successful reply, in milliseconds since 1970.
    """

    success: Spent = field(default_factory=Spent)
    fail: Spent = field(default_factory=Spent)
    queue: Spent = field(default_factory=Spent)
    compute_input: Spent = field(default_factory=Spent)
    compute_infer: Spent = field(default_factory=Spent)
    compute_output: Spent = field(default_factory=Spent)
    last_at_ms: int = 0

    def answered(self, reply: EncodeReply, encode_seconds: float, seconds: float) -> None:
        """Count a successful call that took `seconds`, and the durations of its parts."""
        self.last_at_ms = time.time_ns() // 1_000_000
        self.success.add(seconds)
        self.compute_input.add(reply.tokenize_seconds)
        queue_seconds, compute_seconds = reply.seconds()
        self.queue.add(queue_seconds)
        self.compute_infer.add(compute_seconds)
        self.compute_output.add(encode_seconds)


# The fields of `Statistics`. The protocol has the same names.
_PARTS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
# The statistics of each model. Calls over gRPC and over HTTP are counted together. Used only on the event loop.
_STATISTICS: WeakKeyDictionary[ServedModel, Statistics] = WeakKeyDictionary()


class OpenInference:
    """The methods of the protocol; owned by the event loop."""

    def __init__(self, host: Host) -> None:
        """Keep the calls of all protocols."""
        self._calls = host.calls
        self._catalog = host.calls.catalog

    def is_ready(self) -> bool:
        """Return whether every model is ready and the server is not stopping."""
        return self._are_ready(self._catalog.all())

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return whether a model is ready; False for an unknown model."""
        try:
            return self._are_ready([self._catalog.resolve(name, version)])
        except (ModelNotFound, NotReady):
            return False

    def _are_ready(self, models: list[ServedModel]) -> bool:
        draining = self._calls.draining.is_set()
        return bool(models) and not draining and not any(model.not_ready_reason() for model in models)

    def server_metadata(self) -> pb.ServerMetadataResponse:
        """Return the name, version and extensions of this server."""
        return pb.ServerMetadataResponse(name=_PLATFORM, version=__version__, extensions=_EXTENSIONS)

    def model_metadata(self, call: Call, name: str, version: str) -> pb.ModelMetadataResponse:
        """Return the inputs, outputs and served versions of a model."""
        model = call.resolve(0, name, version)
        return pb.ModelMetadataResponse(
            name=model.bundle.name,
            versions=[it.bundle.version for it in self._catalog.all() if it.bundle.name == model.bundle.name],
            platform=_PLATFORM,
            inputs=map(_metadata_of, inputs_of(model.bundle)),
            outputs=map(_metadata_of, outputs_of(model.outputs)),
        )

    def model_config(self, call: Call, name: str, version: str) -> config_pb.ModelConfig:
        """Return the model configuration for Triton's tools. `max_batch_size` is 0: shapes include the batch size."""
        model = call.resolve(0, name, version)
        bundle = model.bundle
        config = config_pb.ModelConfig(name=bundle.name, platform=_PLATFORM, backend=_PLATFORM, max_batch_size=0)
        for it in inputs_of(bundle):
            config.input.add(name=it.name, data_type=CONFIG_TYPES[it.datatype], dims=it.shape, optional=it.optional)
        for it in outputs_of(model.outputs):
            config.output.add(name=it.name, data_type=CONFIG_TYPES[it.datatype], dims=it.shape)
        config.parameters["fingerprint"].string_value = bundle.fingerprint
        config.parameters["space_id"].string_value = bundle.space_id
        return config

    def index(self, call: Call, *, only_ready: bool) -> pb.RepositoryIndexResponse:
        """Return every version of every model that the caller may use, the default model first."""
        index = pb.RepositoryIndexResponse()
        for model in filter(call.may_use, self._catalog.all()):
            reason = model.not_ready_reason()
            if not (only_ready and reason):
                name, version = model.key
                index.models.add(name=name, version=version, state="UNAVAILABLE" if reason else "READY", reason=reason)
        return index

    def statistics(self, call: Call, name: str, version: str) -> pb.ModelStatisticsResponse:
        """Return the durations of this protocol's calls for a model, or for every model that the caller may use.

        `max_batch_size` is 0, so Triton counts each call as one inference.
        """
        models = [call.resolve(0, name, version)] if name else filter(call.may_use, self._catalog.all())
        response = pb.ModelStatisticsResponse()
        for model in models:
            its = _STATISTICS.get(model, Statistics())
            spent = {part: getattr(its, part) for part in _PARTS}
            response.model_stats.add(
                name=model.bundle.name,
                version=model.bundle.version,
                last_inference=its.last_at_ms,
                inference_count=its.success.count,
                execution_count=its.success.count,
                inference_stats=pb.InferStatistics(
                    **{part: pb.StatisticDuration(count=it.count, ns=it.ns) for part, it in spent.items()}
                ),
            )
        return response

    async def infer(
        self,
        call: Call,
        model: ServedModel,
        sent: SentRequest,
        build: Build,
        *,
        check: Callable[[InferCall], None] = lambda _: None,
        growth: Callable[[InferCall], float] = lambda _: 1.0,
    ) -> bytes:
        """Answer a request.

        Args:
            call: The call.
            model: The model that the call has resolved.
            sent: The request.
            build: Builds the bytes of the reply; called in a thread if the reply is large.
            check: Refuses a request before its data are decoded.
            growth: The maximum number of bytes in the reply for each byte of raw numbers.

        Raises:
            DeadlineExpired: The request's timeout has passed.
        """
        clock = self._calls.clock
        began = clock.now()
        statistics = _STATISTICS.setdefault(model, Statistics())
        built: list[tuple[EncodeReply, float]] = []

        try:
            if len(sent.request_id) > _MAX_ID_CHARS:
                raise InvalidField("id", f"must be at most {_MAX_ID_CHARS} characters; was {len(sent.request_id)}")
            infer = decode_request(sent, model)

            def timed(reply: EncodeReply) -> bytes:
                began = clock.now()
                data = build(model, infer, reply)
                built.append((reply, clock.now() - began))  # may run in a thread; the event loop counts the call later
                return data

            if call.span is not None:
                call.span.about(*model.key, infer.count)
            longest = model.bundle.max_sequence_tokens
            model.check_counts(infer.count, sent.output_count)
            check_length(infer, model)
            async with _in_time(call, infer.parameters.timeout_us, began):
                check(infer)
                decoded = decode_call(infer, longest, model.limits.max_text_bytes)
                response = await call.encode(model, decoded, timed, growth(infer))
        except BaseException:
            statistics.fail.add(clock.now() - began)
            raise
        statistics.answered(*built[0], clock.now() - began)
        return response


@contextlib.asynccontextmanager
async def _in_time(call: Call, timeout_us: int, now: float) -> AsyncGenerator[None]:
    """Raise DeadlineExpired in a block after `timeout_us` microseconds; 0 means never.

    If the call has no earlier deadline, it gets this deadline, so that its sequences leave the queue in time.
    """
    if not timeout_us:
        yield
        return
    call.deadline = min(call.deadline, now + timeout_us / 1e6)
    try:
        async with asyncio.timeout(timeout_us / 1e6):
            yield
    except TimeoutError:
        problem = f"the deadline has passed: the request's timeout is {timeout_us} microseconds"
        raise DeadlineExpired(problem) from None


def _metadata_of(kind: TensorKind) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=kind.name, datatype=kind.datatype, shape=kind.shape)
