"""grpc.reflection.v1 and v1alpha: what services and messages there are, for grpcurl, ghz and their like."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

from encserve_server.rpc.codec import parse
from encserve_server.rpc.guard import Context, Handler, RpcGuard

_V1ALPHA: str = reflection.SERVICE_NAME
_V1 = _V1ALPHA.replace("v1alpha", "v1")
# The messages of both are the same but for their package, and the library has the older one alone.
SERVICE_NAMES = (_V1, _V1ALPHA)
METHODS = {"ServerReflectionInfo": "bidi_stream"}


def handlers(service_names: Sequence[str], guard: RpcGuard) -> dict[str, Handler]:
    """The methods by their names, which tell of these services and of reflection itself.

    They are the library's, but bytes that are no message are refused like everywhere, and methods are found too.
    """
    pool = _pool_of(service_names)
    services = [pool.FindServiceByName(name) for name in (*service_names, *SERVICE_NAMES)]
    service_of_method = {method.full_name: service.full_name for service in services for method in service.methods}
    servicer: Any = reflection.aio.ReflectionServicer([it.full_name for it in services], pool)

    async def tell(requests: AsyncIterator[bytes], context: Context) -> None:
        async for data in requests:
            request = parse(reflection_pb2.ServerReflectionRequest, data)
            asked = reflection_pb2.ServerReflectionRequest()
            asked.CopyFrom(request)
            if request.file_containing_symbol in service_of_method:
                asked.file_containing_symbol = service_of_method[request.file_containing_symbol]
            async for answer in servicer.ServerReflectionInfo(_only(asked), context):
                answer.original_request.CopyFrom(request)
                await context.write(answer.SerializeToString())

    return {"ServerReflectionInfo": guard.listing_stream("ServerReflectionInfo", tell)}


async def _only(request: reflection_pb2.ServerReflectionRequest) -> AsyncIterator[Any]:
    yield request


def _pool_of(service_names: Sequence[str]) -> descriptor_pool.DescriptorPool:
    """The files of these services and of reflection, and no others."""
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
    older = text_format.MessageToString(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
    pool.Add(text_format.Parse(older.replace("v1alpha", "v1"), FileDescriptorProto()))
    return pool
