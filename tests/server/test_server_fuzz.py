"""Tests that each random gRPC message gets a reply or a known status, and that the server still works afterwards."""

import random
from collections import Counter
from typing import Any

import grpc
import pytest
from fake_server import Failed, FakeServer, make_input
from fuzzing import damaged

from encserve_proto.v1 import encoder_pb2 as pb

EXPECTED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


def wild_request(rng: random.Random) -> Any:
    """Return a random request. Most of its fields are valid, and any field may be invalid."""

    def number() -> int:
        wild = [1000, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
        return rng.choice(wild) if rng.random() < 0.03 else rng.randrange(1000)

    def text() -> str:
        alphabet = "hello world \x00\n\t\U0001f30d\u202e\ufeff[SEP]#%{}\\"
        return "".join(rng.choice(alphabet) for _ in range(rng.choice([0, 1, 8, 200])))

    def enum() -> Any:
        return rng.choice([6, -1, 2**31 - 1]) if rng.random() < 0.05 else rng.randrange(3)

    def sequence() -> pb.Input:
        ids = [number() for _ in range(rng.choice([0, 1, 3, 40]))]
        it = rng.choice([pb.Input(), make_input(text()), make_input([number()]), make_input(ids)])
        if rng.random() < 0.2:
            bounds = [sorted(rng.choice([0, 1, 2, 3, 2**32 - 1]) for _ in range(2)) for _ in range(rng.randrange(2))]
            starts, ends = [start for start, _ in bounds], [end for _, end in bounds[rng.random() < 0.05 :]]
            it.spans.CopyFrom(pb.Spans(unit=enum(), starts=starts, ends=ends))
        return it

    inputs = [sequence() for _ in range(rng.choice([0, 1, 1, 2]))]
    options = pb.EncodeOptions(
        outputs=[
            pb.OutputSpec(kind=rng.choice([enum(), 11]), l2_normalize=rng.random() < 0.5)
            for _ in range(rng.choice([0, 0, 1, 3]))
        ],
        data_type=rng.choice([enum(), 3]),
        detail=enum(),
        offset_unit=enum(),
        truncation=enum(),
        exclude_special_tokens=rng.random() < 0.3,
        include_token_strings=rng.random() < 0.3,
    )
    model, version = rng.choice([("", ""), ("tiny", "1"), ("", "2"), ("tiny", ""), (text(), text())])
    return pb.EncodeRequest(model=model, model_version=version, inputs=inputs, options=options)


@pytest.mark.parametrize("seed", range(2))
async def test_any_message_gets_a_reply_or_a_known_status(shared: FakeServer, seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    unexpected: list[Failed] = []
    for _ in range(250):
        data = wild_request(rng).SerializeToString()
        if rng.random() < 0.3:
            data = damaged(data, rng)
        try:
            reply = pb.EncodeResponse.FromString(await shared.call("Encode", data))
        except Failed as failed:
            seen[failed.reason] += 1
            unexpected += [failed] if failed.code not in EXPECTED or not failed.reason else []
        else:
            seen["OK"] += 1
            for tensor in reply.outputs:
                row_bytes = {1: 4 * tensor.width, 2: 2 * tensor.width, 3: -(-tensor.width // 8)}[tensor.data_type]
                assert len(tensor.data) == sum(tensor.lengths) * row_bytes
    assert not unexpected
    assert seen["OK"] > 5, f"the fuzzer sent fewer than 6 good requests: {seen}"
    assert len(seen) >= 4, f"the replies have fewer than 4 different statuses: {seen}"
    assert shared.queued() == 0
    assert len((await shared.encode([1, 2])).sequences) == 1


async def test_any_texts_are_tokenized_or_refused(shared: FakeServer) -> None:
    rng = random.Random(0)
    seen: Counter[grpc.StatusCode] = Counter()
    for _ in range(250):
        wild = wild_request(rng)
        texts = [it.text for it in wild.inputs]
        options = wild.options
        request = pb.TokenizeRequest(
            model=wild.model, texts=texts, truncation=options.truncation, offset_unit=options.offset_unit
        )
        data = request.SerializeToString()
        if rng.random() < 0.3:
            data = damaged(data, rng)
        try:
            reply = pb.TokenizeResponse.FromString(await shared.call("Tokenize", data))
        except Failed as failed:
            seen[failed.code] += 1
        else:
            assert all(len(it.token_ids) == len(it.char_ends) == it.token_count for it in reply.sequences)
            seen[grpc.StatusCode.OK] += 1
    assert seen.keys() == EXPECTED | {grpc.StatusCode.OK}
    assert min(seen.values()) > 5, seen
