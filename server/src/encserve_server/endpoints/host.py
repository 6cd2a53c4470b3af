"""The parts of the server that protocols use."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from encserve_server.calls import Calls
from encserve_server.settings import Settings


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of the server that protocols use.

    Attributes:
        calls: The calls of all protocols, and the models.
        settings: The settings.
        is_serving: Returns whether all models are ready and the server is not stopping.
        inspect_pool: The threads that encode the replies of inspections.
    """

    calls: Calls
    settings: Settings
    is_serving: Callable[[], bool]
    inspect_pool: Executor
