"""What another language does: a call made from the server's reflection alone, without the generated stubs."""

from typing import Any

import grpc
from fake_server import SERVICE, FakeServer
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


async def file_containing(channel: Any, symbol: str) -> list[FileDescriptorProto]:
    """The files that reflection gives for a symbol."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)]))
    answer = await call.read()
    return [FileDescriptorProto.FromString(data) for data in answer.file_descriptor_response.file_descriptor_proto]


async def test_a_caller_without_stubs(server: FakeServer) -> None:
    pool = descriptor_pool.DescriptorPool()
    for file in await file_containing(server.channel, "google.protobuf.Any"):
        pool.Add(file)
    for file in await file_containing(server.channel, SERVICE):
        if file.name.endswith("encoder.proto"):
            pool.Add(file)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("Encode")
    request_type = message_factory.GetMessageClass(method.input_type)
    response_type = message_factory.GetMessageClass(method.output_type)
    request: Any = request_type()
    request.inputs.add().text = "hello world"
    rpc: Any = server.channel.unary_unary(
        f"/{SERVICE}/Encode",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    response = await rpc(request)
    assert list(response.sequences[0].token_ids) == [1, 4, 7, 2]
    assert response.outputs[0].lengths[0] == 4
    assert isinstance(server.channel, grpc.aio.Channel)
