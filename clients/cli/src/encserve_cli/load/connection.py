"""The connection of the load generator to a server."""

import asyncio
import json
from dataclasses import dataclass

import grpc
import grpc.aio

from encserve_client import ServerUnavailableError, Tls

SERVICE = "encserve.v1.EncoderService"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The server, and the credentials of all calls. The arguments of `EncoderClient` have the same meaning."""

    target: str
    tls: Tls | bool = False
    token: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    def open(self) -> grpc.aio.Channel:
        """Open a new channel on the running event loop. One channel is enough: several are not faster.

        Raises:
            InvalidInputError: A file of `tls` is not readable or not valid.
        """
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.target.startswith("dns:") or "," in self.target:  # several servers: each call goes to the next one
            balancing = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE}}
            options.append(("grpc.service_config", json.dumps(balancing)))
        tls = Tls() if self.tls is True else self.tls or None
        if tls is None:
            return grpc.aio.insecure_channel(self.target, options=options)
        if tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        return grpc.aio.secure_channel(self.target, tls.credentials(), options=options)

    async def wait_until_ready(self, channel: grpc.aio.Channel, timeout_seconds: float) -> None:
        """Wait until `channel` is connected.

        Raises:
            ServerUnavailableError: No server answers within the timeout.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await channel.channel_ready()
        except TimeoutError:
            raise ServerUnavailableError(f"{self.target}: no server answered within {timeout_seconds:g} s") from None

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of each call."""
        return self.metadata if self.token is None else (*self.metadata, ("authorization", f"Bearer {self.token}"))
