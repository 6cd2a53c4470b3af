"""Tests a real server under load: cancelled calls, calls with a passed deadline, a full queue, and SIGTERM."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from agreement import worst_relative_error
from checkpoints import MODEL, export_golden
from real_server import RealServer, real_server

from encserve_client import EncoderClient
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.protocols.open_inference.triton import grpc_service_pb2 as triton


class Encode:
    """Requests and replies of our own gRPC protocol, encserve.v1."""

    method = "/encserve.v1.EncoderService/Encode"

    @staticmethod
    def request(ids: list[int]) -> bytes:
        return pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=ids))]).SerializeToString()

    @staticmethod
    def rows_of(reply: bytes) -> Any:
        tensor = pb.EncodeResponse.FromString(reply).outputs[0]
        return np.frombuffer(tensor.data, "<f4").reshape(-1, tensor.width)


class ModelInfer:
    """Requests and replies of the Open Inference Protocol."""

    method = "/inference.GRPCInferenceService/ModelInfer"

    @staticmethod
    def request(ids: list[int]) -> bytes:
        return triton.ModelInferRequest(
            model_name=MODEL,
            inputs=[triton.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[1, len(ids)])],
            raw_input_contents=[np.array(ids, "<i8").tobytes()],
            outputs=[triton.ModelInferRequest.InferRequestedOutputTensor(name="last_hidden_state")],
        ).SerializeToString()

    @staticmethod
    def rows_of(reply: bytes) -> Any:
        response = triton.ModelInferResponse.FromString(reply)
        return np.frombuffer(response.raw_output_contents[0], "<f4").reshape(response.outputs[0].shape[1:])


PROTOCOLS = pytest.mark.parametrize("protocol", [Encode, ModelInfer])


def sequences(real_ids: list[int], count: int, longest: int = 200) -> list[list[int]]:
    """Return random slices of real token ids. Each slice has 5 to `longest` tokens."""
    rng = random.Random(0)
    return [
        real_ids[start : start + rng.randint(5, longest)] for start in rng.sample(range(len(real_ids) - 200), count)
    ]


@PROTOCOLS
async def test_a_cancelled_and_an_expired_call_do_not_disturb_62_callers(
    server: RealServer, client: EncoderClient, real_ids: list[int], protocol: type[Encode | ModelInfer]
) -> None:
    """Of 64 calls, one is cancelled, and one exceeds its deadline. The other calls return the right hidden states."""
    callers = sequences(real_ids, 64, longest=60)
    want = [client.token_vectors([ids])[0] for ids in callers]
    async with grpc.aio.insecure_channel(server.target) as channel:
        rpc: Any = channel.unary_unary(protocol.method)
        cancelled = 0
        for round_number in range(20):
            calls = [rpc(protocol.request(ids), timeout=0.001 if i == 20 else 120) for i, ids in enumerate(callers)]
            answers = [asyncio.ensure_future(call) for call in calls]
            # Wait for the first reply. Then cancel a call that has no reply yet. If all calls have ended (because this
            # process is slow), repeat the round.
            await asyncio.wait(answers[:20] + answers[21:], return_when=asyncio.FIRST_COMPLETED)
            running = max((i for i, answer in enumerate(answers) if not answer.done() and i != 20), default=None)
            if running is not None:
                calls[running].cancel()
            results = await asyncio.gather(*answers, return_exceptions=True)
            if running is not None:
                assert isinstance(results[running], asyncio.CancelledError)
            expired = results[20]
            assert isinstance(expired, grpc.aio.AioRpcError)
            assert expired.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            for i, result in enumerate(results):
                if i not in (20, running):
                    assert isinstance(result, bytes), f"round {round_number}, caller {i}: {result!r}"
                    assert worst_relative_error(protocol.rows_of(result), want[i]) <= 1e-5
            cancelled += running is not None
            if cancelled == 3:
                break
        assert cancelled == 3
        assert protocol.rows_of(await rpc(protocol.request(callers[0]))).shape == want[0].shape


@PROTOCOLS
async def test_calls_beyond_the_queue_limit_are_answered_or_refused(
    models: Path, real_ids: list[int], protocol: type[Encode | ModelInfer]
) -> None:
    """Send about ten times as many tokens as fit into the queue. Every call ends with OK or RESOURCE_EXHAUSTED.

    The server's memory does not grow, and the server continues to answer.
    """
    limit_tokens = 4096
    with real_server(models, "--model", MODEL, "--max-queue-tokens", str(limit_tokens)) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            rpc: Any = channel.unary_unary(protocol.method)
            before = protocol.rows_of(await rpc(protocol.request(real_ids[:50])))
            flood = sequences(real_ids, 400)
            assert sum(map(len, flood)) >= 9.5 * limit_tokens

            async def one(ids: list[int]) -> str:
                try:
                    reply = await rpc(protocol.request(ids))
                except grpc.aio.AioRpcError as error:
                    return str(error.code().name)
                return "OK" if len(protocol.rows_of(reply)) == len(ids) else "WRONG"

            codes: Counter[str] = Counter()
            resident = []
            for _ in range(3):
                codes.update(await asyncio.gather(*map(one, flood)))
                resident.append(server.resident_bytes())
            assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}, codes
            assert codes["RESOURCE_EXHAUSTED"] > codes["OK"] > 0
            assert resident[-1] <= resident[0] + 64 * 2**20, f"resident memory in bytes grew: {resident}"
            assert server.metric("encserve_queue_tokens") == 0
            assert server.metric("encserve_in_flight_requests") == 0
            np.testing.assert_array_equal(protocol.rows_of(await rpc(protocol.request(real_ids[:50]))), before)


@PROTOCOLS
async def test_sigterm_under_load(models: Path, real_ids: list[int], protocol: type[Encode | ModelInfer]) -> None:
    """Send SIGTERM while calls wait. The server answers all calls that arrived before SIGTERM.

    The server answers or refuses later calls, and exits with status 0.
    """
    with real_server(models, "--model", MODEL) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            rpc: Any = channel.unary_unary(protocol.method)
            admitted = [asyncio.ensure_future(rpc(protocol.request(ids))) for ids in sequences(real_ids, 128)]
            while server.metric("grpc_server_started_total", grpc_method=protocol.__name__) < len(admitted):
                await asyncio.sleep(0.01)
            unfinished = sum(not call.done() for call in admitted)
            server.terminate()
            late = [asyncio.ensure_future(rpc(protocol.request(real_ids[:20]))) for _ in range(16)]
            replies = await asyncio.gather(*admitted)
            assert all(len(protocol.rows_of(reply)) > 0 for reply in replies)
            assert unfinished > 0, "all calls were answered before SIGTERM, so the test tested nothing"
            for result in await asyncio.gather(*late, return_exceptions=True):
                if isinstance(result, grpc.aio.AioRpcError):
                    assert result.code() is grpc.StatusCode.UNAVAILABLE
                else:
                    assert isinstance(result, bytes)
        assert server.wait() == 0
        messages = [line["message"] for line in server.log if line["message"] != "calls were refused, or failed"]
        assert messages[-2:] == ["stopping", "stopped"]


def test_the_batch_budget_is_measured_once_and_stored(tmp_path: Path) -> None:
    """With --tune-batches, a server measures the fastest batch budget (tokens per batch), and stores the budget.

    The next server reads the stored budget, and does not measure again. If the machine is too busy for the
    measurement, the server stores nothing, and still answers calls.
    """
    directory = export_golden("split-qkv", tmp_path).path
    with real_server(tmp_path, "--tune-batches") as server, EncoderClient(server.target) as client:
        budget = server.metric("encserve_batch_limit_tokens")
        assert client.token_vectors([[1, 2, 3]])[0].shape == (3, 64)
    assert budget in (256, 384, 512, 768, 1024)
    remembered = directory.parent / ".1.tuned.json"
    messages = [line["message"] for line in server.log if line["message"].startswith("batch budget")]
    assert messages == ["batch budget measured" if remembered.exists() else "batch budget not measurable now"]
    if remembered.exists():
        with real_server(tmp_path, "--tune-batches") as again:
            assert again.metric("encserve_batch_limit_tokens") == budget
        reused = next(line for line in again.log if line["message"] == "batch budget remembered")
        assert "tokens_per_second" not in reused, "the budget was measured again"
        assert reused["max_batch_tokens"] == budget
