"""The list of protocols over gRPC."""

from encserve_server.endpoints.host import Host
from encserve_server.endpoints.rpcs import Service
from encserve_server.protocols.encserve.service import EncoderService
from encserve_server.protocols.open_inference.rpcs import OpenInferenceService


def services(host: Host) -> list[Service]:
    """Return the services of all protocols."""
    return [
        EncoderService(host).service(),
        *([OpenInferenceService(host).service()] if host.settings.open_inference else []),
    ]
