"""The list of protocols over HTTP. These protocols need the packages of the extra `http`."""

from encserve_server.endpoints.host import Host
from encserve_server.endpoints.routes import Route
from encserve_server.protocols.cohere import CohereRoutes
from encserve_server.protocols.jina import JinaRoutes
from encserve_server.protocols.open_inference.routes import OpenInferenceRoutes
from encserve_server.protocols.openai import DIALECT, OpenAiRoutes
from encserve_server.protocols.openapi import DocsRoutes
from encserve_server.protocols.tei import TeiRoutes
from encserve_server.protocols.vllm import VllmRoutes

# The form of errors for paths that do not exist.
DEFAULT_DIALECT = DIALECT


def routes(host: Host) -> list[Route]:
    """Return the routes of all protocols, and the routes that describe them."""
    return DocsRoutes(
        [
            *OpenAiRoutes(host).routes(),
            *TeiRoutes(host).routes(),
            *VllmRoutes(host).routes(),
            *JinaRoutes(host).routes(),
            *CohereRoutes(host).routes(),
            *(OpenInferenceRoutes(host).routes() if host.settings.open_inference else ()),
        ],
        DEFAULT_DIALECT,
    ).routes()
