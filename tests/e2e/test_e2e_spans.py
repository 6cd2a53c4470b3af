"""A real server runs the model once per text, and pools many ranges of the text. Tokenize agrees with Encode."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from checkpoints import DATA, MODEL
from output_models import POOL
from real_server import RealServer

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceStub

TEXT = "Grüße aus Köln, 東京 и Москва: naïve café 🌍 — “quoted”. " + (DATA.parent.parent / "LICENSE").read_text()[:800]
OUTPUTS = [
    pb.OutputSpec(),
    *(pb.OutputSpec(kind=pb.OUTPUT_KIND_SPANS, span_pooling=f"OUTPUT_KIND_{kind.name}") for kind in POOL),
]


@pytest.fixture(scope="module")
def stub(server: RealServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        yield EncoderServiceStub(channel)


def tensor_of(tensor: pb.RaggedTensor) -> Any:
    return np.frombuffer(tensor.data, "<f4").reshape(-1, tensor.width)


def test_a_thousand_ranges_of_one_text_are_pooled(stub: Any) -> None:
    """Pool a thousand ranges of a text. Each vector differs by at most 1e-6 from NumPy's mean of the hidden states.

    A range is a start and an end in characters. Ranges may overlap, be empty, contain only white space, or be the
    whole text.
    """
    rng = np.random.default_rng(3)
    bounds = np.sort(rng.integers(0, len(TEXT) + 1, (1000, 2)), axis=1)
    bounds[0], bounds[1], bounds[2] = (0, len(TEXT)), (5, 6), (7, 7)

    def ask(ranges: Any) -> pb.EncodeResponse:
        it = pb.Input(text=TEXT, spans=pb.Spans(starts=ranges[:, 0].tolist(), ends=ranges[:, 1].tolist()))
        options = pb.EncodeOptions(outputs=OUTPUTS)
        response = stub.Encode(pb.EncodeRequest(model=MODEL, inputs=[it, pb.Input(text="other")], options=options))
        assert isinstance(response, pb.EncodeResponse)
        return response

    with ThreadPoolExecutor(4) as pool:  # several threads, so that calls run together in a batch
        responses = list(pool.map(ask, np.split(bounds, [1, 500])))
        responses.append(ask(bounds))
    for response, ranges in zip(responses, [*np.split(bounds, [1, 500]), bounds], strict=True):
        info = response.sequences[0]
        count = info.token_count
        rows = tensor_of(response.outputs[0])[:count].astype(np.float64)
        starts, ends = np.array(info.char_starts), np.array(info.char_ends)
        of_text = (ends > starts) & ~np.array(info.special)
        tokens = [np.flatnonzero(of_text & (starts < end) & (ends > start) & (start < end)) for start, end in ranges]
        assert list(info.span_token_counts) == [len(places) for places in tokens]
        for tensor, pool_rows in zip(response.outputs[1:], POOL.values(), strict=True):
            assert list(tensor.lengths) == [len(ranges), 0]
            want = np.array([pool_rows(rows[it]) if len(it) else np.zeros(tensor.width) for it in tokens])
            assert np.abs(tensor_of(tensor) - want).max() <= 1e-6


def test_tokenize_gives_the_tokens_of_encode(stub: Any) -> None:
    """With truncation, Tokenize returns the same tokens as Encode.

    Without truncation, Tokenize returns all tokens of a text that is too long for the model. `offset_unit` chooses
    offsets in characters or in bytes.
    """
    texts = [TEXT, "", TEXT * 3]
    options = pb.EncodeOptions(truncation=pb.TRUNCATION_END, include_token_strings=True)
    request = pb.EncodeRequest(model=MODEL, inputs=[pb.Input(text=it) for it in texts], options=options)
    cut = pb.TokenizeRequest(model=MODEL, texts=texts, truncation=pb.TRUNCATION_END, include_token_strings=True)
    assert list(stub.Tokenize(cut).sequences) == list(stub.Encode(request).sequences)
    whole, in_bytes = (
        stub.Tokenize(pb.TokenizeRequest(model=MODEL, texts=texts, offset_unit=unit)).sequences[2]
        for unit in (pb.OFFSET_UNIT_CODE_POINTS, pb.OFFSET_UNIT_UTF8_BYTES)
    )
    assert whole.token_count > 400
    assert not whole.truncated
    characters = [texts[2][start:end] for start, end in zip(whole.char_starts, whole.char_ends, strict=True)]
    data = texts[2].encode()
    assert [
        data[start:end].decode() for start, end in zip(in_bytes.char_starts, in_bytes.char_ends, strict=True)
    ] == characters
    assert "".join(characters).replace(" ", "") == "".join(texts[2].split())
