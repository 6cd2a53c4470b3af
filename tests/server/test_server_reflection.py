"""Tests of gRPC reflection with the requests of other tools, and of a call without generated stubs."""

from typing import Any

import grpc
import pytest
from fake_server import SERVICE, FakeServer, StartServer, refusal
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

VERSIONS = ["v1", "v1alpha"]
ENCODER = "encserve.v1.EncoderService"


async def ask(server: FakeServer, version: str, *requests: ServerReflectionRequest) -> list[ServerReflectionResponse]:
    """Send requests over one stream, and return the replies. Both versions of the service have the same messages."""
    channel: Any = server.channel
    call = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    data = [request.SerializeToString() for request in requests]
    return [ServerReflectionResponse.FromString(answer) async for answer in call(iter(data))]


async def files_for(server: FakeServer, version: str, symbol: str) -> dict[str, FileDescriptorProto]:
    """Return the file that defines a symbol, and the imported files, as a dictionary from name to file."""
    request = ServerReflectionRequest(host="here", file_containing_symbol=symbol)
    (answer,) = await ask(server, version, request)
    assert answer.original_request == request
    assert not answer.HasField("error_response"), answer
    files = map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto)
    return {file.name: file for file in files}


@pytest.mark.parametrize("version", VERSIONS)
async def test_names_the_services(shared: FakeServer, version: str) -> None:
    (answer,) = await ask(shared, version, ServerReflectionRequest(list_services="*"))
    names = [service.name for service in answer.list_services_response.service]
    assert {SERVICE, "grpc.health.v1.Health"} <= set(names)
    assert {f"grpc.reflection.{it}.ServerReflection" for it in VERSIONS} <= set(names)
    for name in names:  # the command `describe` of grpcurl requests each service
        assert await files_for(shared, version, name)


SYMBOLS = [
    ENCODER,
    f"{ENCODER}.Encode",  # ghz asks for the descriptor of the method
    f"{ENCODER}.EncodeStream",
    "encserve.v1.EncodeRequest",
    "encserve.v1.Input.text",
    "encserve.v1.Input.input",
    "encserve.v1.OutputKind",
    "encserve.v1.OUTPUT_KIND_MEAN",
]


@pytest.mark.parametrize("version", VERSIONS)
async def test_finds_symbols_of_every_kind(shared: FakeServer, version: str) -> None:
    for symbol in SYMBOLS:
        files = await files_for(shared, version, symbol)
        (encoder,) = (file for name, file in files.items() if name.endswith("encoder.proto"))
        assert set(encoder.dependency) <= set(files), symbol
    missing = [f"{ENCODER}.Explode", "encserve.v1.Nothing", "encserve.v1", "", "."]
    requests = [ServerReflectionRequest(file_containing_symbol=name) for name in missing]
    requests.append(ServerReflectionRequest(file_by_filename="nothing.proto"))
    *refused, found = await ask(shared, version, *requests, ServerReflectionRequest(file_containing_symbol=ENCODER))
    assert [it.error_response.error_code for it in refused] == [grpc.StatusCode.NOT_FOUND.value[0]] * len(requests)
    assert found.file_descriptor_response.file_descriptor_proto  # the stream still works after the errors


async def test_can_be_turned_off(start_server: StartServer) -> None:
    server = await start_server(reflection=False)
    channel: Any = server.channel
    for version in VERSIONS:
        # The call is unary, because gRPC may report a refused stream as a failure to send.
        call: Any = channel.unary_unary(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        failed = await refusal(call(ServerReflectionRequest(list_services="").SerializeToString()))
        assert failed.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_caller_without_stubs(shared: FakeServer, version: str) -> None:
    """Like grpcurl, a caller without stubs can load a service's descriptors, build a request, and call the method."""
    pool = descriptor_pool.DescriptorPool()
    for file in reversed((await files_for(shared, version, ENCODER)).values()):  # the pool needs imported files first
        pool.Add(file)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("Encode")
    request_type = message_factory.GetMessageClass(method.input_type)
    response_type = message_factory.GetMessageClass(method.output_type)
    request: Any = request_type()
    request.inputs.add().text = "hello world"
    channel: Any = shared.channel
    rpc: Any = channel.unary_unary(
        f"/{SERVICE}/Encode",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    response = await rpc(request)
    assert list(response.sequences[0].token_ids) == [1, 4, 7, 2]
    assert response.outputs[0].lengths[0] == 4
