"""What tools of other languages ask reflection for, and a call made from its answers alone."""

from typing import Any

import grpc
import pytest
from fake_server import SERVICE, FakeServer, StartServer
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

VERSIONS = ["v1", "v1alpha"]
ENCODER = "encserve.v1.EncoderService"


async def ask(server: FakeServer, version: str, *requests: ServerReflectionRequest) -> list[ServerReflectionResponse]:
    """The answers to requests of one stream; the messages of both versions are the same on the wire."""
    channel: Any = server.channel
    call = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    data = [request.SerializeToString() for request in requests]
    return [ServerReflectionResponse.FromString(answer) async for answer in call(iter(data))]


async def files_for(server: FakeServer, version: str, symbol: str) -> dict[str, FileDescriptorProto]:
    """The files by their names that describe a symbol, what they import included."""
    request = ServerReflectionRequest(host="here", file_containing_symbol=symbol)
    (answer,) = await ask(server, version, request)
    assert answer.original_request == request
    assert not answer.HasField("error_response"), answer
    files = map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
    return {file.name: file for file in files}


@pytest.mark.parametrize("version", VERSIONS)
async def test_names_the_services(server: FakeServer, version: str) -> None:
    (answer,) = await ask(server, version, ServerReflectionRequest(list_services="*"))
    names = [service.name for service in answer.list_services_response.service]
    assert {SERVICE, "grpc.health.v1.Health"} <= set(names)
    assert {f"grpc.reflection.{it}.ServerReflection" for it in VERSIONS} <= set(names)
    for name in names:  # grpcurl's `describe` asks for each
        assert await files_for(server, version, name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "symbol",
    [
        ENCODER,
        f"{ENCODER}.Encode",  # ghz asks for the method
        f"{ENCODER}.EncodeStream",
        "encserve.v1.EncodeRequest",
        "encserve.v1.Input.text",
        "encserve.v1.Input.input",
        "encserve.v1.OutputKind",
        "encserve.v1.OUTPUT_KIND_MEAN",
    ],
)
async def test_finds_symbols_of_every_kind(server: FakeServer, version: str, symbol: str) -> None:
    files = await files_for(server, version, symbol)
    (encoder,) = (file for name, file in files.items() if name.endswith("encoder.proto"))
    assert set(encoder.dependency) <= set(files)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_stream_goes_on_after_what_is_not_there(server: FakeServer, version: str) -> None:
    missing = [f"{ENCODER}.Explode", "encserve.v1.Nothing", "encserve.v1", "", "."]
    requests = [ServerReflectionRequest(file_containing_symbol=name) for name in missing]
    requests.append(ServerReflectionRequest(file_by_filename="nothing.proto"))
    *refused, found = await ask(server, version, *requests, ServerReflectionRequest(file_containing_symbol=ENCODER))
    assert [it.error_response.error_code for it in refused] == [grpc.StatusCode.NOT_FOUND.value[0]] * len(requests)
    assert found.file_descriptor_response.file_descriptor_proto


async def test_can_be_turned_off(start_server: StartServer) -> None:
    server = await start_server(reflection=False)
    channel: Any = server.channel
    for version in VERSIONS:
        # As a unary call: a stream may be refused while it is sending, and then gRPC blames the sending.
        call: Any = channel.unary_unary(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(ServerReflectionRequest(list_services="").SerializeToString())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_caller_without_stubs(server: FakeServer, version: str) -> None:
    """As grpcurl does: the services, the files of one, a message of its method, the call."""
    pool = descriptor_pool.DescriptorPool()
    for file in reversed((await files_for(server, version, ENCODER)).values()):  # what is imported comes behind
        pool.Add(file)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("Encode")
    request_type = message_factory.GetMessageClass(method.input_type)
    response_type = message_factory.GetMessageClass(method.output_type)
    request: Any = request_type()
    request.inputs.add().text = "hello world"
    channel: Any = server.channel
    rpc: Any = channel.unary_unary(
        f"/{SERVICE}/Encode",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    response = await rpc(request)
    assert list(response.sequences[0].token_ids) == [1, 4, 7, 2]
    assert response.outputs[0].lengths[0] == 4
