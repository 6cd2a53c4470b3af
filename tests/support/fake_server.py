"""A complete server on a free loopback port. Only the engine and the inspector are fake."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from fake_engine import FakeEngine, FakeInspector
from google.rpc import error_details_pb2, status_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.app import App, Prepare
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.models.turns import FairThreadPool
from encserve_server.outputs import ModelOutputs
from encserve_server.repository.loaded import LoadedModel
from encserve_server.repository.manager import Loader
from encserve_server.settings import Settings
from encserve_server.telemetry import page
from encserve_server.types.bundles import Bundle, Graph, InspectGraph, ModelPooling
from encserve_server.types.inspections import InspectKind
from encserve_server.types.requests import OutputKind

D_MODEL, VOCAB_SIZE, LONGEST = 4, 1000, 32
N_LAYERS, N_HEADS = 3, 2
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "hello", "brave", "new", "world"]
SERVICE = "encserve.v1.EncoderService"
INFER_SERVICE = "inference.GRPCInferenceService"
page._STOP_SECONDS = 0.01  # the metrics page stops within this time; the tests stop hundreds of servers


def write_tokenizer(path: Path, unknown: str = "[UNK]") -> Path:
    """Write a tokenizer with eight words.

    The file also turns on truncation and padding, as many real tokenizer files do.
    """
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(path))
    return path


class Failed(Exception):
    """The error of a failed call: the status code, the text, encserve's reason, and the google.rpc details.

    The details are stored by message type. `refused` has the text and the reason of each refused input.
    """

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.text = error.details() or ""
        trailers = dict(error.trailing_metadata() or ())
        self.reason = trailers.get("encserve-error-reason", "")
        self.pushback_ms = trailers.get("grpc-retry-pushback-ms")
        refused = json.loads(trailers.get("encserve-refused-inputs", "[]"))
        self.refused: list[tuple[str, str]] = [(it["message"], it["reason"]) for it in refused]
        self.details: dict[str, Any] = {}
        packed = trailers.get("grpc-status-details-bin")
        if packed is not None:
            status = status_pb2.Status.FromString(packed)
            for detail in status.details:
                message = getattr(error_details_pb2, detail.TypeName().rpartition(".")[2])()
                detail.Unpack(message)
                self.details[detail.TypeName()] = message
        super().__init__(f"{self.code}: {self.text}")


class FakeServer:
    """A running server and a gRPC channel to the server."""

    def __init__(self, app: App, engine: FakeEngine, inspector: FakeInspector, channel: grpc.aio.Channel) -> None:
        self.app = app
        self.engine = engine
        self.inspector = inspector
        self.channel = channel

    async def call(self, method: str, request: Any, service: str = SERVICE, **options: Any) -> bytes:
        """Send a message or raw bytes to a unary method, and return the bytes of the reply.

        Raise `Failed` if the call fails.
        """
        data = request if isinstance(request, bytes) else request.SerializeToString()
        rpc: Any = self.channel.unary_unary(f"/{service}/{method}")
        try:
            reply = await rpc(data, **options)
        except grpc.aio.AioRpcError as error:
            raise Failed(error) from error
        assert isinstance(reply, bytes)
        return reply

    async def encode(self, *inputs: str | list[int], options: pb.EncodeOptions | None = None, **call: Any) -> Any:
        """Encode texts and lists of token ids, and return the reply."""
        request = pb.EncodeRequest(inputs=map(make_input, inputs), options=options)
        return pb.EncodeResponse.FromString(await self.call("Encode", request, **call))

    async def start_held(self, call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Make the engine wait, and start a call. Return after the call's first batch has reached the engine."""
        while self.engine.started.acquire(blocking=False):
            pass  # remove the counts of earlier batches
        self.engine.hold()
        task = asyncio.create_task(call)
        await asyncio.to_thread(self.engine.started.acquire)
        return task

    @contextlib.asynccontextmanager
    async def queue_of(self, tokens: int, **call: Any) -> AsyncIterator[None]:
        """Keep a call of `tokens` tokens in the queue until the end of the block.

        During this time, the engine is busy with another call. `call` has options of both calls, such as metadata.
        """
        running = await self.start_held(self.encode([1], **call))
        waiting = asyncio.create_task(self.encode([2] * tokens, **call))
        try:
            await until(lambda: self.queued() == tokens)
            yield
        finally:
            self.engine.let_go()
            await asyncio.gather(running, waiting)

    async def inspect(self, request: Any, **options: Any) -> list[pb.InspectResponse]:
        """Send a message or raw bytes to Inspect, and return all messages of the reply.

        Raise `Failed` if the call fails.
        """
        data = request if isinstance(request, bytes) else request.SerializeToString()
        rpc: Any = self.channel.unary_stream(f"/{SERVICE}/Inspect")
        try:
            return [pb.InspectResponse.FromString(part) async for part in rpc(data, **options)]
        except grpc.aio.AioRpcError as error:
            raise Failed(error) from error

    def sample(self, name: str, **labels: str) -> float:
        """Return the value of a metric."""
        # `get_sample_value` would collect all metrics. Tests call this method thousands of times.
        metrics = self.app.registry.restricted_registry([name]).collect()
        values = [it.value for metric in metrics for it in metric.samples if (it.name, it.labels) == (name, labels)]
        assert values, f"no sample {name}{labels}"
        return values[0]

    def queued(self, unit: str = "tokens") -> float:
        """Return the size of tiny@2's queue. `unit` is tokens, sequences, requests or text_bytes."""
        return self.sample(f"encserve_queue_{unit}", model="tiny", version="2")

    def rpc_sample(self, name: str, method: str = "Encode", **labels: str) -> float:
        """Return the value of the metric grpc_server_NAME for a method.

        A method whose name begins with "Model" belongs to the Open Inference Protocol. Other methods belong to our
        service.
        """
        kind = "bidi_stream" if "Stream" in method else "unary"
        service = INFER_SERVICE if method.startswith("Model") else SERVICE
        return self.sample(f"grpc_server_{name}", grpc_type=kind, grpc_service=service, grpc_method=method, **labels)

    def handled(self, code: str, method: str = "Encode") -> float:
        """Return the number of calls of a method that ended with a status code."""
        return self.rpc_sample("handled_total", method, grpc_code=code)

    def in_flight(self) -> float:
        """Return the number of open calls of all protocols."""
        return self.sample("encserve_in_flight_requests")

    def held_bytes(self) -> float:
        """Return the number of bytes in the requests and replies of all open calls, of all protocols."""
        return self.sample("encserve_in_flight_bytes")

    async def stop(self) -> None:
        """Let waiting batches finish, close the channel, and stop the server."""
        self.engine.let_go()
        self.inspector.let_go()
        await self.channel.close()
        await self.app.stop()


async def refusal(call: Awaitable[Any]) -> Failed:
    """Wait for a call that must fail, and return the error."""
    try:
        await call
    except Failed as failed:
        return failed
    except grpc.aio.AioRpcError as error:
        return Failed(error)
    raise AssertionError("the call did not fail")


def make_input(it: Any) -> pb.Input:
    """Convert a text, a list of token ids, or an array of vectors to an input."""
    if isinstance(it, np.ndarray):
        data_type = pb.DATA_TYPE_FLOAT16 if it.dtype == np.float16 else pb.DATA_TYPE_FLOAT32
        return pb.Input(embeddings=pb.TokenEmbeddings(width=it.shape[1], data_type=data_type, data=it.tobytes()))
    return pb.Input(text=it) if isinstance(it, str) else pb.Input(token_ids=pb.TokenIds(ids=it))


def sets(tensor: pb.RaggedTensor) -> list[tuple[Any, Any]]:
    """Return the vectors and the indices of each sequence.

    Vectors have the shape (n, width). Indices have the shape (n,), or are None if the tensor has no indices.
    """
    dtype = {pb.DATA_TYPE_FLOAT32: "<f4", pb.DATA_TYPE_FLOAT16: "<f2"}[tensor.data_type]
    rows = np.frombuffer(tensor.data, dtype).reshape(-1, tensor.width)
    assert len(rows) == sum(tensor.lengths)
    indices = np.frombuffer(tensor.indices, "<u4") if tensor.indices else None
    ends = np.cumsum(tensor.lengths)
    return [
        (rows[end - count : end], None if indices is None else indices[end - count : end])
        for end, count in zip(ends, tensor.lengths, strict=True)
    ]


def rows_of(response: pb.EncodeResponse, output: int = 0) -> list[Any]:
    """Return the hidden states or vectors of an output: a (rows, width) array for each input."""
    return [rows for rows, _ in sets(response.outputs[output])]


StartServer = Callable[..., Awaitable[FakeServer]]


def fake_model(
    bundle_directory: Path,
    tokenize_pool: FairThreadPool,
    engine: FakeEngine,
    *,
    fingerprint: str = "f" * 32,
    space_id: str = "s2-" + "5" * 32,
    tokenizer_file: Path | None = None,
    takes_vectors: bool = False,
    load_inspector: Callable[[], FakeInspector] | None = None,
    position: str = "sinusoidal",
    prompts: Mapping[str, str] | None = None,
    max_queue_text_mib: int = 16,
) -> LoadedModel:
    """Return a loaded model with a fake engine."""
    graph = Graph(
        path=bundle_directory / "model.onnx",
        input_name="inputs",
        takes_vectors=takes_vectors,
        attention_mask_name="mask",
        output_name="rows",
        pad_token_id=0,
        d_model=D_MODEL,
        precision="float32",
    )
    names: dict[InspectKind, tuple[str, ...]] = dict.fromkeys(InspectKind, ())
    bundle = Bundle(
        name=bundle_directory.parent.name,
        version=bundle_directory.name,
        fingerprint=fingerprint,
        space_id=space_id,
        d_model=D_MODEL,
        n_layers=N_LAYERS,
        n_heads=N_HEADS,
        vocab_size=0 if takes_vectors else VOCAB_SIZE,
        max_sequence_tokens=LONGEST,
        special_token_ids=(0, 1, 2) if tokenizer_file else (),
        pooling=ModelPooling((OutputKind.MEAN,), l2_normalize=True, width=D_MODEL) if tokenizer_file else None,
        tokenizer_file=tokenizer_file,
        graph=graph,
        inspect_graph=InspectGraph(graph, names, {}) if load_inspector else None,
        position=position,
        parameters={"attention": 12, "norm": 3},
        prompts=prompts or {},
        default_prompt_name=next(iter(prompts or ()), ""),
    )
    tokenizer = TextTokenizer(tokenizer_file, tokenize_pool, max_queue_text_mib * 2**20) if tokenizer_file else None
    return LoadedModel(bundle, tokenizer, ModelOutputs(bundle), engine, 0.1, 0.1, load_inspector)


async def start_fake_server(
    directory: Path,
    engine: FakeEngine | None = None,
    *,
    with_tokenizer: bool = True,
    unknown: str = "[UNK]",
    takes_vectors: bool = False,
    can_inspect: bool = True,
    load_inspector: Callable[[], FakeInspector] | None = None,
    position: str = "sinusoidal",
    prompts: Mapping[str, str] | None = None,
    load: Loader | None = None,
    prepare: Prepare | None = None,
    **settings: Any,
) -> FakeServer:
    """Start a server with the models tiny@2 and tiny@1. The default model is tiny@2.

    The default prompt is the first of `prompts`. For `prepare`, see `App.start`. Other keyword arguments are settings
    of the server.
    """
    engine = engine or FakeEngine(D_MODEL)
    inspector = FakeInspector(D_MODEL, N_HEADS, LONGEST)
    with_tokenizer = with_tokenizer and not takes_vectors
    tokenizer_file = write_tokenizer(directory / "tokenizer.json", unknown)

    def load_fake(
        bundle_directory: Path, settings: Settings, tokenize_pool: FairThreadPool, served: str
    ) -> LoadedModel:
        return fake_model(
            bundle_directory,
            tokenize_pool,
            engine,
            tokenizer_file=tokenizer_file if with_tokenizer else None,
            takes_vectors=takes_vectors,
            load_inspector=(load_inspector or (lambda: inspector)) if can_inspect else None,
            position=position,
            prompts=prompts,
            max_queue_text_mib=settings.max_queue_text_mib,
        )

    repository = directory / "models"
    for version in ("1", "2"):
        (repository / "tiny" / version).mkdir(parents=True, exist_ok=True)
        (repository / "tiny" / version / "manifest.json").touch()
    chosen = {
        "model_repository": repository,
        "model": ("tiny@2", "tiny@1"),
        "grpc_port": 0,
        "metrics_port": 0,
        **settings,
    }
    app = App(Settings(**chosen), load or load_fake)
    await app.start(prepare)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}", options=[("grpc.max_receive_message_length", -1)])
    return FakeServer(app, engine, inspector, channel)
