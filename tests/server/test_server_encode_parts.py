"""Tests of large calls, in all protocols: a call that runs in parts gets the same reply as without parts."""

import asyncio
import gc
import random
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import FakeEngine, fake_rows
from fake_server import D_MODEL, SERVICE, Failed, FakeServer, StartServer, make_input, refusal
from http_calls import post
from open_inference import ask, infer, infer_request, text_tensor
from tiny_bundle import VOCAB_SIZE
from tiny_heads import Serve, every_kind, text
from waiting import collector_off, until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.protocols.encserve import codec
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as triton
from encserve_server.types.sequences import TokenSequence

MANY = 2048
# A call has at most two parts in the queue at a time. A part has at most 1,024 tokens, an eighth of the queue.
SMALL_QUEUE = {"max_queue_tokens": 8192}
DATA_TYPES = (pb.DATA_TYPE_FLOAT32, pb.DATA_TYPE_FLOAT16)
INPUT_UNITS = (0, pb.OFFSET_UNIT_CODE_POINTS, pb.OFFSET_UNIT_UTF8_BYTES, pb.OFFSET_UNIT_TOKENS)


def cut_into_small_parts(patch: pytest.MonkeyPatch) -> None:
    """Let the server prepare three inputs at a time, and run each sequence as a separate part."""
    patch.setattr("encserve_server.models.inputs._PIECE_INPUTS", 3)
    patch.setattr("encserve_server.models.parts._QUEUE_SHARE_DIVISOR", 10**9)


def random_input(rng: random.Random, *, with_spans: bool) -> pb.Input:
    """Return a text or ids, with up to three spans."""
    ids = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
    is_text = rng.random() < 0.7
    it = make_input(text(*ids) + rng.choice(["", " é", " 🌍"]) if is_text else ids)
    if with_spans and rng.random() < 0.7:
        unit: Any = rng.choice(INPUT_UNITS if is_text else (0, pb.OFFSET_UNIT_TOKENS))
        most = len(ids)  # a text has at least this many characters, bytes and tokens
        spans = [sorted((rng.randint(0, most), rng.randint(0, most))) for _ in range(rng.randrange(4))]
        it.spans.CopyFrom(pb.Spans(unit=unit, starts=[it[0] for it in spans], ends=[it[1] for it in spans]))
    return it


def random_request(rng: random.Random) -> pb.EncodeRequest:
    """Return a valid request with 2 to 20 inputs."""
    kinds = [pb.OUTPUT_KIND_SPARSE, pb.OUTPUT_KIND_MULTI_VECTOR, pb.OUTPUT_KIND_TOKENS, pb.OUTPUT_KIND_MEAN]
    kinds += [pb.OUTPUT_KIND_CLS, pb.OUTPUT_KIND_SPANS]
    outputs = [
        pb.OutputSpec(kind=kind, l2_normalize=kind != pb.OUTPUT_KIND_SPARSE and rng.random() < 0.3)
        for kind in rng.sample(kinds, rng.randrange(1, 4))
    ]
    strings = rng.random() < 0.3
    options = pb.EncodeOptions(
        outputs=outputs,
        data_type=rng.choice(DATA_TYPES),
        detail=pb.DETAIL_TOKENS if strings else rng.randrange(4),  # type: ignore[arg-type]
        include_token_strings=strings,
        offset_unit=rng.choice([0, pb.OFFSET_UNIT_CODE_POINTS, pb.OFFSET_UNIT_UTF8_BYTES]),  # type: ignore[arg-type]
        truncation=pb.TRUNCATION_END,
        exclude_special_tokens=rng.random() < 0.3,
    )
    with_spans = any(it.kind == pb.OUTPUT_KIND_SPANS for it in outputs)
    inputs = [random_input(rng, with_spans=with_spans) for _ in range(rng.randrange(2, 21))]
    return pb.EncodeRequest(inputs=inputs, options=options)


async def reply_of(server: FakeServer, request: pb.EncodeRequest) -> bytes:
    """Return the bytes of the reply without its timings, or the text of the error."""
    try:
        reply = pb.EncodeResponse.FromString(await server.call("Encode", request))
    except Failed as failed:
        return f"{failed.reason} {failed.text}".encode()
    reply.ClearField("timings")
    return reply.SerializeToString()


@pytest.mark.parametrize("seed", range(3))
async def test_a_reply_in_parts_equals_the_reply_in_one_piece(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A call has the same reply with parts and without parts.

    The limit of replies also counts the same size for both replies.
    """
    kinds = every_kind()
    server = await serve(kinds.pop("files"), {"max_batch_sequences": 1}, **kinds)
    sizes: list[int] = []
    encode_reply = codec.encode_reply

    def counting(model: Any, call: Any, request_id: Any, reply: Any) -> bytes:
        sizes.append(reply.estimated_bytes)
        return encode_reply(model, call, request_id, reply)

    monkeypatch.setattr(codec, "encode_reply", counting)
    rng = random.Random(seed)
    for _ in range(40):
        request = random_request(rng)
        whole = await reply_of(server, request)
        with monkeypatch.context() as patch:
            cut_into_small_parts(patch)
            assert await reply_of(server, request) == whole, request
    # The model refuses requests with ids that exclude special tokens. A refused request adds no size.
    assert len(sizes) > 40
    assert sizes[::2] == sizes[1::2]
    await until(lambda: server.held_bytes() == 0)


BROKEN = [
    pb.Input(),
    make_input([]),
    make_input([VOCAB_SIZE]),
    make_input([1] * 999),
    make_input("w5 " * 200_000),
    make_input(np.ones((2, 3), np.float32)),
    pb.Input(text="w5", spans=pb.Spans(starts=[1], ends=[99])),
    pb.Input(text="w5", spans=pb.Spans(starts=[1], ends=[0])),
    pb.Input(token_ids=pb.TokenIds(ids=[5]), spans=pb.Spans(unit=pb.OFFSET_UNIT_CODE_POINTS, starts=[0], ends=[1])),
]


@pytest.mark.parametrize("at", [0, 2, 3, 10])
async def test_an_error_in_parts_equals_the_error_in_one_piece(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    kinds = every_kind()
    server = await serve(kinds.pop("files"), **kinds)
    outputs = [pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS), pb.OutputSpec(kind=pb.OUTPUT_KIND_MULTI_VECTOR)]
    for broken in BROKEN:
        inputs = [make_input("w5 w6")] * 11
        inputs[at] = broken
        request = pb.EncodeRequest(inputs=inputs, options=pb.EncodeOptions(outputs=outputs))
        whole = await reply_of(server, request)
        assert f"inputs[{at}]".encode() in whole
        with monkeypatch.context() as patch:
            cut_into_small_parts(patch)
            assert await reply_of(server, request) == whole
    await until(lambda: server.held_bytes() == 0)


def count_sequences() -> int:
    """Return the number of sequences in memory, including sequences that other tests have left."""
    return sum(type(it) is TokenSequence for it in gc.get_objects())


@pytest.mark.parametrize("at", [0, 5, 10])
async def test_a_failed_call_in_parts_leaves_nothing_in_memory(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The memory of the call is freed without the cycle collector, because the server runs the collector rarely."""
    server = await start_server()
    server.engine.nan_id = 9
    cut_into_small_parts(monkeypatch)
    inputs = [[7]] * 11
    inputs[at] = [9]
    with collector_off():
        before = count_sequences()
        for _ in range(3):
            assert (await refusal(server.encode(*inputs))).reason == "INFERENCE_FAILED"
        await until(lambda: count_sequences() <= before)


@pytest.mark.parametrize("output", ["rows", "sparse", "multi_vector", "embedding"])
async def test_padded_tensors_in_parts_equal_those_in_one_piece(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """With padding, each sequence takes as many bytes as the longest sequence, which may be in any part."""
    kinds = every_kind()
    server = await serve(kinds.pop("files"), {"max_batch_sequences": 1}, **kinds)
    names = {
        "rows": ["last_hidden_state"],
        "sparse": ["sparse_weights", "sparse_indices"],
        "multi_vector": ["multi_vector"],
        "embedding": ["embedding"],
    }[output]
    texts = text_tensor(*[text(*range(5, 6 + i * 7 % 11)) for i in range(20)])
    request = infer_request(text=texts, outputs=names)
    whole = await ask(server, "ModelInfer", request, triton.ModelInferResponse)
    with monkeypatch.context() as patch:
        cut_into_small_parts(patch)
        assert await ask(server, "ModelInfer", request, triton.ModelInferResponse) == whole


async def test_a_large_request_of_a_stream_runs_in_parts(start_server: StartServer) -> None:
    server = await start_server(**SMALL_QUEUE)
    rpc: Any = server.channel.stream_stream(f"/{SERVICE}/EncodeStream")
    stream = rpc()
    inputs = [make_input([7] * 32)] * MANY
    bad = [*inputs[:-1], make_input([VOCAB_SIZE * 99])]
    for name, sent in (("good", inputs), ("bad", bad)):
        request = pb.EncodeStreamRequest(request_id=name, request=pb.EncodeRequest(inputs=sent))
        await stream.write(request.SerializeToString())
    await stream.done_writing()
    replies = {}
    while (data := await stream.read()) is not grpc.aio.EOF:
        reply = pb.EncodeStreamResponse.FromString(data)
        replies[reply.request_id] = reply
    assert replies["good"].response.outputs[0].data == fake_rows(np.array([7] * 32), D_MODEL).tobytes() * MANY
    assert replies["bad"].error.message.startswith(f"inputs[{MANY - 1}].token_ids.ids[0]: must be from 0")
    await until(lambda: server.held_bytes() == 0)


async def test_one_setting_limits_the_inputs_of_all_protocols(start_server: StartServer) -> None:
    server = await start_server(http_port=0, max_request_sequences=2)
    three = ["hello"] * 3
    text_of_limit = "must hold at most 2 sequences (max_request_sequences); was 3"
    assert text_of_limit in (await refusal(server.encode(*three))).text
    tokenize = pb.TokenizeRequest(texts=three)
    assert text_of_limit in (await refusal(server.call("Tokenize", tokenize))).text
    assert text_of_limit in (await refusal(infer(server, text=text_tensor(*three)))).text
    for route, body in (("/v1/embeddings", {"input": three}), ("/embed", {"inputs": three})):
        assert text_of_limit in (await post(server, route, body)).text
    assert text_of_limit in (await post(server, "/tokenize", {"inputs": three})).text
    info = pb.GetModelResponse.FromString(await server.call("GetModel", pb.GetModelRequest())).model
    assert info.max_request_sequences == 2
    assert (await post(server, "/embed", {"inputs": three[:2]})).status_code == 200


async def test_only_one_sequence_can_be_larger_than_the_queue(start_server: StartServer) -> None:
    server = await start_server(max_queue_tokens=24)
    assert len((await server.encode(*[[1] * 24] * 3)).sequences) == 3
    failed = await refusal(server.encode([5, 6], [7] * 25, [5, 6]))
    assert failed.reason == "REQUEST_TOO_LARGE"
    assert failed.text.startswith("inputs[1]: must be at most 24 tokens (max_queue_tokens); was 25")
    assert (await refusal(server.encode([7] * 25))).text.startswith("inputs[0]: must be at most 24 tokens")
    assert server.queued() == 0
    await until(lambda: server.held_bytes() == 0)


@pytest.mark.system  # takes more than a second
async def test_a_call_whose_deadline_passes_releases_all_resources(start_server: StartServer) -> None:
    server = await start_server(**SMALL_QUEUE)
    large = await server.start_held(server.encode(*[[7] * 32] * MANY, timeout=1.0))
    for _ in range(5):
        server.engine.let_one_go()
        await asyncio.to_thread(server.engine.started.acquire)
    assert (await refusal(large)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: server.in_flight() == 0)
    server.engine.let_go()
    await until(lambda: server.queued() == 0)
    assert server.held_bytes() == 0
    assert sum(map(sum, server.engine.batches)) < MANY * 32 / 4


async def test_an_open_inference_call_of_more_tokens_than_the_queue_runs_in_parts(start_server: StartServer) -> None:
    """The statistics count the call once, although the call runs in several batches."""
    server = await start_server(FakeEngine(D_MODEL), http_port=0, **SMALL_QUEUE)
    ids = np.full((MANY, 32), 7)
    await infer(server, input_ids=ids, outputs=["embedding"])
    name = triton.ModelStatisticsRequest(name="tiny")
    found = await ask(server, "ModelStatistics", name, triton.ModelStatisticsResponse)
    stats = found.model_stats[0].inference_stats
    assert (stats.success.count, stats.fail.count, stats.compute_infer.count) == (1, 0, 1)
    assert stats.compute_infer.ns == 1_000_000  # the run time of one batch of the fake engine
    assert server.sample("encserve_batches_total", model="tiny", version="2", closed_by="tokens") > 1
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": ids.shape, "data": ids.reshape(-1).tolist()}
    rest = await post(server, "/v2/models/tiny/infer", {"inputs": [tensor], "outputs": [{"name": "embedding"}]})
    assert rest.json()["outputs"][0]["shape"] == [MANY, D_MODEL]
