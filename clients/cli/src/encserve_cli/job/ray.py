"""A job on a Ray cluster. Each actor has the model and makes parts of the output.

The driver has the plan but no rows. If an actor or its node dies, Ray starts the actor again on any node with room. The
driver gives the missing parts of the work to the next free actor. Ray's own retries are not used: Ray tries again at
once, and needs some seconds to see that a node is lost. `ray.util.ActorPool` does not report which work failed.
"""

import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from encserve_cli.bundles.finding import find_bundle
from encserve_cli.job.api import RayOptions
from encserve_cli.job.job import Backend
from encserve_cli.job.local import EngineOptions, LocalBackend
from encserve_cli.job.output import finished_parts
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan, differences
from encserve_cli.job.run import LocalWorker, Reports, Worker
from encserve_cli.job.store import Store
from encserve_cli.job.types import BatchProgress, Part, PartReport, Stopped, Work

logger = logging.getLogger(__name__)

_MOST_DEATHS = 3  # the job ends after this many deaths of actors in the same work
_AWAY_SECONDS = 60.0  # the longest time without an answer of an actor
_LOOK_SECONDS = 1.0  # the time between two checks for a stop
_WARN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class NodeBackend:
    """A bundle in the process of an actor; see `encserve_cli.job.job.Backend`.

    Attributes:
        bundle: A path that every node has, or a URI. A node copies the bundle of a URI once, into the user's cache.
        engine: The engine's options.
        threads: The number of CPU threads for batches, if neither `engine` nor the plan has a number.
    """

    bundle: str
    engine: EngineOptions
    threads: int | None

    def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
        """See `Backend`.

        Raises:
            FileNotFoundError: The node does not have the path.
            ValueError, RuntimeError, OSError: The bundle cannot be copied or loaded. The message has the reason.
        """
        if "://" not in self.bundle and not Path(self.bundle).is_dir():
            raise FileNotFoundError(
                f"the bundle {self.bundle} is missing; put it into a folder that every node has, or give --bundle a URI"
            )
        engine = self.engine.as_before(before)
        engine = dataclasses.replace(engine, intra_op_threads=engine.intra_op_threads or self.threads)
        return LocalBackend(find_bundle(self.bundle), engine).open(make, before)


class RayBackend:
    """A backend on each actor of a cluster; see `encserve_cli.job.job.Backend`."""

    def __init__(self, backend: Backend, options: RayOptions) -> None:
        """`backend` runs in each actor, so Ray pickles it. `options` name the cluster."""
        self._backend = backend
        self._options = options

    @classmethod
    def of_bundle(cls, bundle: str, engine: EngineOptions, options: RayOptions) -> "RayBackend":
        """Return the backend of a bundle. `bundle` is a path that every node has, or a URI."""
        path = bundle if "://" in bundle else str(Path(bundle).absolute())
        threads = None if options.actor_gpus else max(1, int(_needs(options)["CPU"]))
        return cls(NodeBackend(path, engine, threads), options)

    def open(self, make: MakeOptions, before: ModelFacts | None) -> Worker:
        """Join or start the cluster, and load the model in a first actor.

        Raises:
            RuntimeError: No cluster answers, or the actor cannot load the model.
        """
        was_connected = ray.is_initialized()  # True if the calling program has connected
        if not was_connected:
            _connect(self._options.address)
        try:
            return RayWorker(self._backend, self._options, make, before, is_owner=not was_connected)
        except BaseException:
            if not was_connected:
                ray.shutdown()
            raise


def _connect(address: str) -> None:
    """Join a cluster, or start one on this machine.

    Raises:
        RuntimeError: No cluster answers.
    """
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        settings["include_dashboard"] = False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.hostname and parts.port:  # fails fast; Ray itself would try for minutes
            socket.create_connection((parts.hostname, parts.port), timeout=5).close()
        with _keeping_sigterm():
            ray.init(**settings)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise RuntimeError(
            f"--ray {address}: no Ray cluster answers ({_first_line(error)}); `ray start --head` starts one, "
            "and --ray local starts a cluster on this machine for the job"
        ) from error


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, because Ray replaces the handler."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _needs(options: RayOptions) -> dict[str, float]:
    """Return the resources of an actor, by Ray's names."""
    cpus = 1.0 if options.actor_cpus is None else options.actor_cpus
    return {"CPU": cpus} | ({"GPU": options.actor_gpus} if options.actor_gpus else {})


def _fitting_actors(needs: Mapping[str, float]) -> int:
    """Return the number of actors that fit on the current nodes, if nothing else runs on the nodes."""
    nodes = [it["Resources"] for it in ray.nodes() if it["Alive"]]  # type: ignore[no-untyped-call]
    return sum(
        int(min((its.get(name, 0.0) / amount for name, amount in needs.items() if amount), default=1)) for its in nodes
    )


class _Actor:
    """A loaded model on some node."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._worker: Worker | None = None

    def open(self, make: MakeOptions, before: ModelFacts | None) -> tuple[MakeOptions, ModelFacts]:
        """Load the model."""
        with _errors_of_node():
            self._worker = self._worker or self._backend.open(make, before)
            return self._worker.make, self._worker.model

    def run(self, plan: Plan, store: Store, work: Work) -> tuple[list[PartReport], int]:
        """Make the parts of `work`. Return the reports of the parts, and the number of tokens."""
        make, model = self.open(plan.make, plan.model)
        counts: list[int] = []
        with _errors_of_node():
            if problems := differences(plan, plan.read, make, model):
                raise ValueError(f"the model differs from the model of the job: {'; '.join(problems)}")
            assert self._worker is not None  # noqa: S101 - `open` sets it
            made = list(self._worker.run(plan, store, [work], lambda _, tokens: counts.append(tokens)))
        return made, sum(counts)


@contextmanager
def _errors_of_node() -> Iterator[None]:
    """Put the name of the node before an expected error. Other errors keep their traceback."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        raise RuntimeError(f"node {address} ({ray.get_runtime_context().get_node_id()[:8]}): {error}") from None


class RayWorker:
    """Makes parts on the actors of a cluster; see `encserve_cli.job.run.Worker`."""

    divides_files = True

    def __init__(self, backend: Backend, options: RayOptions, *arguments: Any, is_owner: bool) -> None:
        """Load the model in a first actor.

        Args:
            backend: The backend of an actor.
            options: The cluster, which this process has joined.
            *arguments: The arguments of `Backend.open`.
            is_owner: Whether `close` disconnects from the cluster.
        """
        self._backend = backend
        self._needs = _needs(options)
        self._most = options.actors
        self._is_owner = is_owner
        self._stopped = False  # not an Event: a signal handler may call `stop`, and must not wait for a lock
        self._warn_at = time.monotonic() + _WARN_SECONDS
        self._actors = [self._start()]
        # reply → (actor, work); the work is None while an actor loads the model.
        self._calls: dict[Any, tuple[Any, Work | None]] = {}
        self._deaths: Counter[Work] = Counter()
        self._away_since: dict[int, float] = {}  # id of an actor that does not answer → time
        reply = self._actors[0].open.remote(*arguments)
        while not self._wait([reply]):
            pass
        self.make: MakeOptions
        self.model: ModelFacts
        try:
            self.make, self.model = ray.get(reply)
        except RayError as error:
            raise _plain(error, "the actor died while it loaded the model") from None

    def _start(self) -> Any:
        settings = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU"), "max_restarts": -1}
        return ray.remote(_Actor).options(**settings).remote(self._backend)

    def run(self, plan: Plan, store: Store, work: Sequence[Work], on_batch: BatchProgress) -> Reports:
        """See `Worker`."""
        count = min(self._most or max(1, _fitting_actors(self._needs)), len(work))
        self._actors += [self._start() for _ in range(count - 1)]
        for actor in self._actors:
            self._load(actor)
        job, to_store = ray.put(plan), ray.put(store)
        left, idle = deque(work), list[Any]()
        while left or any(it is not None for _, it in self._calls.values()):
            while left and idle:
                actor, it = idle.pop(), left.popleft()
                self._calls[actor.run.remote(job, to_store, it)] = actor, it
            if not left:
                self._release(idle)
            for reply in self._wait(list(self._calls)):
                actor, given = self._calls.pop(reply)
                try:
                    answer = ray.get(reply)
                except RayActorError as error:
                    if given is not None:
                        done = finished_parts(plan, store, given.has)
                        yield from done.values()
                        given = given.without(done)
                        left.append(given)
                    self._repeat(actor, given, plan, error)
                    continue
                except RayError as error:
                    raise _plain(error, "the cluster failed") from None
                idle.append(actor)
                self._away_since.pop(id(actor), None)
                if given is not None:
                    reports, tokens = answer
                    on_batch(0, tokens)
                    yield from reports

    def _load(self, actor: Any) -> None:
        self._calls[actor.open.remote(self.make, self.model)] = actor, None

    def _release(self, idle: list[Any]) -> None:
        """End actors without work. Then restarting actors find room, and an autoscaler can remove nodes."""
        loading = [reply for reply, (_, it) in self._calls.items() if it is None]
        for actor in [*idle, *(self._calls.pop(reply)[0] for reply in loading)]:
            ray.kill(actor)
        idle.clear()

    def _repeat(self, actor: Any, given: Work | None, plan: Plan, error: RayActorError) -> None:
        """Load the model again in an actor that died. Ray may need some seconds to see that a node is lost.

        Raises:
            RuntimeError: The actors died too often in the same work, or the actor has been away for too long.
        """
        since = self._away_since.setdefault(id(actor), time.monotonic())
        if given is not None:
            self._deaths[given] += 1  # counts from 0 again if a part was finished since the last death
            if self._deaths[given] == _MOST_DEATHS:
                name, uri = Part(given.input, given.first).name, plan.inputs[given.input].uri
                what = f"an actor died {_MOST_DEATHS} times while it made {name} or one of the next parts, of {uri}"
                raise _plain(error, what)
        elif time.monotonic() - since > _AWAY_SECONDS:
            raise _plain(error, f"an actor has not answered for {_AWAY_SECONDS:.0f} s")
        time.sleep(_LOOK_SECONDS)
        self._load(actor)

    def _wait(self, replies: list[Any]) -> list[Any]:
        """Wait at most a second. Return the replies that are ready. Warn if no actor is ready for a long time."""
        if self._stopped:
            raise Stopped
        ready: list[Any] = ray.wait(replies, timeout=_LOOK_SECONDS)[0]
        if ready or any(it is not None for _, it in self._calls.values()):
            self._warn_at = time.monotonic() + _WARN_SECONDS
        elif time.monotonic() >= self._warn_at:
            self._warn_at += _WARN_SECONDS
            needs = ", ".join(f"{name} {amount:g}" for name, amount in self._needs.items())
            logger.warning("no actor is ready yet: it loads the model, or waits for a node with %s", needs)
        return ready

    def stop(self) -> None:
        """See `Worker`. Unfinished parts are lost."""
        self._stopped = True

    def close(self) -> None:
        """See `Worker`."""
        for actor in self._actors:
            ray.kill(actor)
        if self._is_owner:
            ray.shutdown()


def _plain(error: RayError, what: str) -> RuntimeError:
    """Return the error of an actor without Ray's traceback. `what` is the message if the actor died."""
    if isinstance(error, RayTaskError):
        return RuntimeError(str(error.cause if type(error.cause) is RuntimeError else error))
    return RuntimeError(f"{what}. Perhaps a node has too little memory for an actor: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
