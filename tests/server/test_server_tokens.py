"""Tests of Tokenize, and of three options of Encode: details, units of offsets, and small data types."""

from typing import Any

import pytest
from fake_server import LONGEST, Failed, FakeServer, StartServer
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.models.offsets import utf8_offsets

MEAN = pb.OutputSpec(kind=pb.OUTPUT_KIND_MEAN)


async def tokenize(server: FakeServer, *texts: str, **fields: Any) -> pb.TokenizeResponse:
    request = pb.TokenizeRequest(texts=texts, **fields)
    return pb.TokenizeResponse.FromString(await server.call("Tokenize", request))


async def test_tokenize_gives_the_sequences_of_encode(shared: FakeServer) -> None:
    texts = ["hello world", "", "brave new world"]
    reply = await tokenize(shared, *texts, include_token_strings=True)
    options = pb.EncodeOptions(include_token_strings=True)
    assert list(reply.sequences) == list((await shared.encode(*texts, options=options)).sequences)
    assert (reply.model, reply.model_version, reply.fingerprint) == ("tiny", "2", "f" * 32)
    first = reply.sequences[0]
    assert (list(first.token_ids), list(first.tokens)) == ([1, 4, 7, 2], ["[CLS]", "hello", "world", "[SEP]"])
    assert (list(first.char_starts), list(first.char_ends)) == ([0, 0, 6, 0], [0, 5, 11, 0])
    assert list(first.special) == [True, False, False, True]


async def test_tokenize_truncates_only_on_request(shared: FakeServer) -> None:
    text = "hello " * 50
    (whole,) = (await tokenize(shared, text)).sequences
    assert (whole.token_count, whole.truncated, len(whole.token_ids)) == (52, False, 52)
    (cut,) = (await tokenize(shared, text, truncation=pb.TRUNCATION_END)).sequences
    assert (cut.token_count, cut.original_token_count, cut.truncated) == (LONGEST, 52, True)
    with pytest.raises(Failed, match=r"texts\[0\]: must be at most 32 tokens .*; was 52"):
        await tokenize(shared, text, truncation=pb.TRUNCATION_REFUSE)


async def test_tokenize_puts_the_prompt_before_texts(start_server: StartServer) -> None:
    server = await start_server(prompts={"q": "brave ", "none": ""})
    (default,) = (await tokenize(server, "hello")).sequences
    assert list(default.token_ids) == [1, 5, 4, 2]
    (plain,) = (await tokenize(server, "hello", prompt_name="")).sequences
    assert list(plain.token_ids) == [1, 4, 2]


async def test_tokenize_needs_no_engine(server: FakeServer) -> None:
    server.engine.broken = True
    for _ in range(4):
        with pytest.raises(Failed):
            await server.encode([1])
    await until(lambda: server.sample("encserve_ready", model="tiny", version="2") == 0)
    assert (await tokenize(server, "hello")).sequences[0].token_count == 3
    server.engine.broken = False


async def test_tokenize_refuses_a_reply_that_is_too_large(start_server: StartServer) -> None:
    server = await start_server(max_response_mib=1)
    too_large = r"texts: the reply would take .* over the limit of 1048576 .*the first 1 of 2"
    with pytest.raises(Failed, match=too_large) as caught:
        await tokenize(server, "hello", "new " * 60_000)
    assert caught.value.reason == "RESPONSE_TOO_LARGE"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"texts": []}, "texts: .* was empty"),
    ({"texts": ["a"] * 2049}, "texts: .* 2048 .* was 2049"),
    ({"texts": ["a", "x" * 262145]}, r"texts\[1\]: .* 262144 .* was 262145"),
    ({"texts": ["a"], "prompt_name": "q"}, "prompt_name: .* 'q'"),
    ({"texts": ["a"], "task": pb.TASK_QUERY}, "task: .* TASK_QUERY"),
    ({"texts": ["a"], "offset_unit": pb.OFFSET_UNIT_TOKENS}, "offset_unit: must not be OFFSET_UNIT_TOKENS"),
    ({"texts": ["a"], "offset_unit": 9}, "offset_unit: .* OffsetUnit, 0 to 3; was 9"),
    ({"texts": ["a"], "truncation": 7}, "truncation: .* Truncation, 0 to 2; was 7"),
]


@pytest.mark.parametrize(("fields", "problem"), BAD)
async def test_tokenize_refuses_by_field_and_number(shared: FakeServer, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(Failed, match=f"INVALID_ARGUMENT: {problem}"):
        await shared.call("Tokenize", pb.TokenizeRequest(**fields))


async def test_tokenize_needs_a_tokenizer(start_server: StartServer) -> None:
    server = await start_server(with_tokenizer=False)
    with pytest.raises(Failed, match="texts: model tiny has no tokenizer"):
        await tokenize(server, "hello")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (pb.EncodeOptions(outputs=[MEAN]), "counts"),
        (pb.EncodeOptions(), "tokens"),
        (pb.EncodeOptions(outputs=[MEAN, pb.OutputSpec()]), "tokens"),
        (pb.EncodeOptions(outputs=[MEAN], include_token_strings=True), "tokens"),
        (pb.EncodeOptions(detail=pb.DETAIL_NONE), "nothing"),
        (pb.EncodeOptions(detail=pb.DETAIL_COUNTS), "counts"),
        (pb.EncodeOptions(outputs=[MEAN], detail=pb.DETAIL_TOKENS), "tokens"),
    ],
)
async def test_the_detail_of_sequences_is_that_of_the_options(
    shared: FakeServer, options: pb.EncodeOptions, expected: str
) -> None:
    response = await shared.encode("hello world", [5], options=options)
    text, ids = response.sequences
    if expected == "nothing":
        assert [text.ByteSize(), ids.ByteSize()] == [0, 0]
        return
    assert [(it.token_count, it.original_token_count, it.truncated) for it in (text, ids)] == [
        (4, 4, False),
        (1, 1, False),
    ]
    tokens = [1, 4, 7, 2] if expected == "tokens" else []
    assert [list(text.token_ids), list(ids.token_ids)] == [tokens, []]
    assert [len(text.char_starts), len(text.char_ends), len(text.special)] == [len(tokens)] * 3


async def test_token_strings_need_full_detail(shared: FakeServer) -> None:
    options = pb.EncodeOptions(include_token_strings=True, detail=pb.DETAIL_COUNTS)
    with pytest.raises(Failed, match="options.include_token_strings: .* DETAIL_TOKENS"):
        await shared.encode("hello", options=options)
    unknown: Any = 4
    with pytest.raises(Failed, match="options.detail: .* Detail, 0 to 3; was 4"):
        await shared.encode("hello", options=pb.EncodeOptions(detail=unknown))


async def test_offsets_can_be_counted_in_bytes(shared: FakeServer) -> None:
    text = "héllo 🙂 wörld"
    options = pb.EncodeOptions(offset_unit=pb.OFFSET_UNIT_UTF8_BYTES)
    (tokens,) = (await tokenize(shared, text, offset_unit=pb.OFFSET_UNIT_UTF8_BYTES)).sequences
    (encoded,) = (await shared.encode(text, options=options)).sequences
    assert tokens == encoded
    words = [text.encode()[start:end].decode() for start, end in zip(tokens.char_starts, tokens.char_ends, strict=True)]
    assert words == ["", "héllo", "🙂", "wörld", ""]


@given(st.text())
def test_utf8_offsets_count_the_bytes_before_each_code_point(text: str) -> None:
    assert utf8_offsets(text).tolist() == [len(text[:i].encode()) for i in range(len(text) + 1)]
