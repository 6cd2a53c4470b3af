"""grpc.reflection.v1 and v1alpha: describes the services and messages to tools such as grpcurl and ghz."""

from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any

from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

from encserve_server.endpoints.rpcs import parse
from encserve_server.transport.grpc.connections import Context
from encserve_server.transport.grpc.guard import Handler, RpcGuard

_V1ALPHA: str = reflection.SERVICE_NAME
_V1 = _V1ALPHA.replace("v1alpha", "v1")
# Both versions have the same messages in different packages. The grpcio library supports only v1alpha.
SERVICE_NAMES = (_V1, _V1ALPHA)
METHODS = {"ServerReflectionInfo": "bidi_stream"}


def handlers(service_names: Sequence[str], guard: RpcGuard) -> dict[str, Handler]:
    """Return the handlers by method name. They describe the given services and reflection itself.

    The library computes the replies. In addition, these handlers refuse malformed messages, and find methods by name.
    """
    pool = _pool_of(tuple(service_names))
    services = [pool.FindServiceByName(name) for name in (*service_names, *SERVICE_NAMES)]
    service_of_method = {method.full_name: service.full_name for service in services for method in service.methods}
    servicer: Any = reflection.aio.ReflectionServicer([it.full_name for it in services], pool)

    async def answer(requests: AsyncIterator[bytes], context: Context) -> None:
        async for data in requests:
            request = parse(reflection_pb2.ServerReflectionRequest, data)
            lookup = reflection_pb2.ServerReflectionRequest()
            lookup.CopyFrom(request)
            if request.file_containing_symbol in service_of_method:
                lookup.file_containing_symbol = service_of_method[request.file_containing_symbol]
            async for reply in servicer.ServerReflectionInfo(_stream_of(lookup), context):
                reply.original_request.CopyFrom(request)
                await context.write(reply.SerializeToString())

    return {"ServerReflectionInfo": guard.listing_stream("ServerReflectionInfo", answer)}


async def _stream_of(request: reflection_pb2.ServerReflectionRequest) -> AsyncIterator[Any]:
    yield request


@cache
def _pool_of(service_names: tuple[str, ...]) -> descriptor_pool.DescriptorPool:
    """Return a pool with only the files of these services and of reflection."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            pool.AddSerializedFile(file.serialized_pb)

    for name in (*service_names, _V1ALPHA):
        add(descriptor_pool.Default().FindServiceByName(name).file)
    v1alpha = text_format.MessageToString(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
    pool.Add(text_format.Parse(v1alpha.replace("v1alpha", "v1"), FileDescriptorProto()))
    return pool
