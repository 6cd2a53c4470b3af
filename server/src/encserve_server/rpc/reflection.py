"""grpc.reflection.v1alpha: what services and messages there are, for grpcurl and its like."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from encserve_server.rpc.codec import parse
from encserve_server.rpc.guard import Context, Handler, answering

SERVICE_NAME: str = reflection.SERVICE_NAME
METHODS = {"ServerReflectionInfo": "bidi_stream"}


def handlers(service_names: Sequence[str]) -> dict[str, Handler]:
    """The methods by their names: the library's, but bytes that are no message are refused like everywhere."""
    servicer: Any = reflection.aio.ReflectionServicer(service_names)  # whose types are not those of its methods

    async def tell(requests: AsyncIterator[bytes], context: Context) -> None:
        parsed = (parse(reflection_pb2.ServerReflectionRequest, data) async for data in requests)
        async for answer in servicer.ServerReflectionInfo(parsed, context):
            await context.write(answer.SerializeToString())

    return {"ServerReflectionInfo": answering(tell)}
