"""Tests that results never mix vectors of different models.

A fingerprint identifies the files of an exported model. All exports of the same model share a space id. All vectors of
a result have the same fingerprint. If a client expects a fingerprint or a space id, it refuses other vectors.
"""

import itertools

import grpc
import numpy as np
import pytest
from fake_encoder import Caller, FakeEncoder, Refused, rows_of

from encserve_client import EncserveError, FingerprintError, SpaceError
from encserve_proto.v1 import encoder_pb2 as pb

TEXTS = ["one", "two words", "and three words"]
EITHER = pytest.mark.parametrize(("what", "error"), [("fingerprint", FingerprintError), ("space_id", SpaceError)])


def switch_after(service: FakeEncoder, *counts: int) -> None:
    """Change the fingerprint of the server after some requests.

    The first `counts[0]` requests get "version 0", the next `counts[1]` requests get "version 1", and so on.
    """
    versions = [version for version, count in enumerate(counts) for _ in range(count)]
    coming = itertools.chain(versions, itertools.repeat(len(counts)))

    async def before(request: pb.EncodeRequest) -> None:
        del request
        service.fingerprint = f"version {next(coming)}"

    service.before = before


async def test_a_call_is_repeated_if_the_model_changes_meanwhile(caller: Caller, service: FakeEncoder) -> None:
    """The model changes between two messages of a call.

    The client repeats the whole call, because one result must not have vectors of two versions.
    """
    service.max_request_sequences = 1
    switch_after(service, 2)
    client = caller.connect(max_concurrent_messages=1)
    result = await caller(client.run, TEXTS)
    assert result.fingerprint == "version 1"
    np.testing.assert_array_equal(result.outputs[0].arrays()[0], rows_of([1, 3, 2]))
    assert len(service.requests) == result.timings.attempts == 6


async def test_a_model_that_changes_in_each_attempt_is_an_error(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 1
    switch_after(service, 1, 2, 2, 2, 2)
    client = caller.connect(max_concurrent_messages=1)
    with pytest.raises(FingerprintError, match="answers of one call have different fingerprints"):
        await caller(client.token_vectors, TEXTS)
    assert len(service.requests) == 9  # the client makes the call three times, with three messages each


async def test_replies_of_two_versions_do_not_cause_repeated_get_model(caller: Caller, service: FakeEncoder) -> None:
    """During a rollout, replies come alternately from two versions of the model.

    The client must not send GetModel again for each change of the version.
    """
    client = caller.connect()
    for version in ("old", "new") * 5:
        service.fingerprint = version
        await caller(client.token_vectors, TEXTS)
    assert service.n_get_model == 1


async def test_without_inputs_the_result_is_from_the_current_model(caller: Caller, service: FakeEncoder) -> None:
    client = caller.connect()
    await caller(client.token_vectors, TEXTS)
    service.fingerprint = "new"
    assert (await caller(client.run, [])).fingerprint == "new"
    client = caller.connect(expected_fingerprint="mine")
    with pytest.raises(FingerprintError, match="^expected_fingerprint: mine is expected, but the answer has new"):
        await caller(client.run, [])
    service.space_id = ""
    with pytest.raises(SpaceError, match="^expected_space_id: mine is expected, but the answer has none"):
        await caller(caller.connect(expected_space_id="mine").run, [])


async def test_every_request_has_the_expected_ids(caller: Caller, service: FakeEncoder) -> None:
    service.max_request_sequences = 2
    client = caller.connect(expected_fingerprint=service.fingerprint, expected_space_id=service.space_id)
    await caller(client.token_vectors, TEXTS)
    await caller(client.embed, TEXTS)
    await caller(client.inspect, TEXTS[0])
    assert len(service.requests) == 4
    expected = [(it.expected_fingerprint, it.expected_space_id) for it in service.requests]
    expected += [(it.expected_fingerprint, it.expected_space_id) for it in service.inspect_requests]
    assert set(expected) == {(service.fingerprint, service.space_id)}


@EITHER
async def test_a_refused_id_has_a_separate_error_class(
    caller: Caller, service: FakeEncoder, what: str, error: type[EncserveError]
) -> None:
    """If the server refuses the expected id, the call raises SpaceError or FingerprintError.

    The client does not retry, because the server would refuse the call again.
    """
    reason = "SPACE_MISMATCH" if error is SpaceError else "FINGERPRINT_MISMATCH"

    async def refuse(request: pb.EncodeRequest) -> None:
        text = f"expected_{what}: {getattr(request, f'expected_{what}')!r} is expected"
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, text, reason)

    service.before = refuse
    client = caller.connect(**{f"expected_{what}": "mine"})
    with pytest.raises(error, match="'mine' is expected") as caught:
        await caller(client.token_vectors, TEXTS)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert caught.value.field == f"expected_{what}"
    assert len(service.requests) == 1


@EITHER
async def test_the_client_checks_ids_if_an_old_server_does_not(
    caller: Caller, service: FakeEncoder, what: str, error: type[EncserveError]
) -> None:
    """An older server ignores the expected space id or fingerprint, and replies.

    The client compares the expected value with the value in the reply, and raises an error if they differ.
    """
    client = caller.connect(**{f"expected_{what}": "mine"})
    message = f"^expected_{what}: mine is expected, but the answer has {getattr(service, what)[:4]}"
    for call in (client.token_vectors, client.embed, client.run):
        with pytest.raises(error, match=message):
            await caller(call, TEXTS)
    with pytest.raises(error, match=message):
        await caller(client.inspect, TEXTS[0])


async def test_nothing_is_expected_by_default(caller: Caller, service: FakeEncoder) -> None:
    await caller(caller.connect().token_vectors, TEXTS)
    assert (service.requests[0].expected_fingerprint, service.requests[0].expected_space_id) == ("", "")
