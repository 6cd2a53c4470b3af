"""A job on a Ray cluster: a pool of actors, each with the model, does the parts. The driver holds the plan and no data.

An actor that dies, alone or with its node, is replaced, and its parts are done again. Actors that wait for room are
what a cluster's autoscaler adds nodes for; actors without work end, so that it can remove nodes.
"""

import dataclasses
import logging
import math
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError, RayTaskError

from encserve_cli.job.api import RayOptions
from encserve_cli.job.bundles import find_bundle
from encserve_cli.job.job import Opened, Source
from encserve_cli.job.local import EngineOptions, LocalSource
from encserve_cli.job.output import REJECTED
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan, differences
from encserve_cli.job.run import PartWorker
from encserve_cli.job.store import Store
from encserve_cli.job.types import BatchProgress, Encoded, Part, PartReport, Stopped, Value, ignore_batch

logger = logging.getLogger(__name__)

# Of each actor, as of a process that works alone: one is computed, one is tokenized or waits, one is read or written.
_PARTS_AT_ONCE = 3
_MAX_DEATHS = 3
# How soon a request to stop is noticed, and nodes that came or went.
_LOOK_SECONDS = 1.0
# How long batches that run are waited for once the job is to stop.
_STOP_SECONDS = 10.0
_WARN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class NodeSource:
    """A bundle in the process that opens it, an actor on some node; see `encserve_cli.job.job.Source`.

    Attributes:
        bundle: Its path, which every node sees, or its URI, which a node copies once into the user's cache.
        engine: How it is run.
        threads: The CPU's threads that run batches, unless `engine` or the plan of the job says how many.
    """

    bundle: str
    engine: EngineOptions
    threads: int | None

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> Opened:
        """Loads it.

        Raises:
            FileNotFoundError: The node does not have the path.
            ValueError, RuntimeError, OSError: It cannot be copied or loaded; the text says why.
        """
        if "://" not in self.bundle and not Path(self.bundle).is_dir():
            raise FileNotFoundError(
                f"the bundle {self.bundle} is not there; put it where every node sees it, or give --bundle its URI"
            )
        engine = self.engine.as_before(before)
        engine = dataclasses.replace(engine, intra_op_threads=engine.intra_op_threads or self.threads)
        return LocalSource(find_bundle(self.bundle), engine).open(make, kind, before)


class RaySource:
    """A bundle on a Ray cluster; see `encserve_cli.job.job.Source`."""

    def __init__(self, bundle: str, engine: EngineOptions, options: RayOptions) -> None:
        """Takes a bundle, as a path that every node sees or a URI; how each actor runs it; and the cluster."""
        path = bundle if "://" in bundle else str(Path(bundle).absolute())
        threads = None if options.actor_gpus else max(1, int(_actor_cpus(options)))
        self._node_source = NodeSource(path, engine, threads)
        self._options = options

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> Opened:
        """Joins or starts the cluster, and has a first actor load the model.

        Raises:
            RuntimeError: There is no cluster, or the actor cannot load the model.
        """
        return open_on_ray(self._node_source, self._options, make, kind, before)


def open_on_ray(
    source: Source, options: RayOptions, make: MakeOptions, kind: str | None, before: ModelFacts | None
) -> Opened:
    """Has every actor open a source, which Ray pickles; see `RaySource.open`."""
    disconnect = _connect(options.address)
    try:
        first = _start(source, options)
        made, model = _ask(first, options, make, kind, before)
    except BaseException:
        disconnect()
        raise
    return Opened(
        make=made,
        model=model,
        runner=lambda plan, store: RayRunner(plan, store, source, options, first),
        close=disconnect,
        encoder=lambda: _FirstActor(first),
        workers=lambda: _expected_actors(options),
    )


def _expected_actors(options: RayOptions) -> int:
    """How many actors the job gets, if no other job runs and no node is added.

    Raises:
        RuntimeError: The cluster does not answer.
    """
    try:
        fitting = _capacity(_needs(options))
    except RayError as error:
        raise RuntimeError(f"the Ray cluster does not answer: {_first_line(error)}") from error
    return max(1, min(fitting, options.actors or fitting))


def _connect(address: str) -> Callable[[], None]:
    """Joins a cluster, or starts one on this machine; what is returned leaves it, or ends it.

    Raises:
        RuntimeError: There is none.
    """
    if ray.is_initialized():  # by the program that calls us
        return lambda: None
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
    if address == "local":
        settings["include_dashboard"] = False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _check_port(address)
        with _keeping_sigterm():
            ray.init(**settings)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise RuntimeError(
            f"--ray {address}: no Ray cluster answers there ({_first_line(error)}); `ray start --head` starts one, "
            "and --ray local runs the job on a cluster of its own on this machine"
        ) from error
    return ray.shutdown


def _check_port(address: str) -> None:
    """Raises OSError where nothing listens, which Ray would find after minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), timeout=_LOOK_SECONDS * 5).close()


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Puts the handler of SIGTERM back, which Ray replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _actor_cpus(options: RayOptions) -> float:
    return 1.0 if options.actor_cpus is None else options.actor_cpus


def _needs(options: RayOptions) -> dict[str, float]:
    """What an actor takes of a node, as Ray names it."""
    return {"CPU": _actor_cpus(options)} | ({"GPU": options.actor_gpus} if options.actor_gpus else {})


def _start(source: Source, options: RayOptions) -> Any:
    """Starts an actor; what it is asked waits until it has room."""
    return (
        ray.remote(_Actor)
        .options(
            num_cpus=_actor_cpus(options),
            num_gpus=options.actor_gpus,
            max_restarts=0,
            max_concurrency=_PARTS_AT_ONCE + 1,  # and a request to stop
        )
        .remote(source)
    )


def _ask(
    actor: Any, options: RayOptions, make: MakeOptions, kind: str | None, before: ModelFacts | None
) -> tuple[MakeOptions, ModelFacts]:
    """What the first actor says of the model."""
    reply = actor.open.remote(make, kind, before)
    patience = _Patience(options)
    while not ray.wait([reply], timeout=_LOOK_SECONDS)[0]:
        patience.check()
    try:
        found: tuple[MakeOptions, ModelFacts] = ray.get(reply)
    except RayTaskError as error:
        raise _plain(error) from None
    except RayError as error:
        raise RuntimeError(f"the first actor died while it loaded the model: {error}") from error
    return found


class _Actor:
    """What runs on a node. Ray calls its methods from several threads, so that neighbouring parts overlap."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._opened: Opened | None = None
        self._worker: PartWorker  # once the job is known
        self._turn = 0
        self._turns = threading.Condition()

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> tuple[MakeOptions, ModelFacts]:
        """Loads the model."""
        with _errors_of_node():
            self._opened = self._source.open(make, kind, before)
            return self._opened.make, self._opened.model

    def encode(self, values: Sequence[Value]) -> Encoded:
        """Encodes a sample of a job; only the counts are returned."""
        with _errors_of_node():
            assert self._opened is not None  # noqa: S101 - only the first actor is asked, after `open`
            return dataclasses.replace(self._opened.encoder().encode(values, ignore_batch), result=None)

    def begin(self, plan: Plan, store: Store) -> str:
        """Loads the model if need be, and takes the job; the answer is the node's id."""
        with _errors_of_node():
            opened = self._opened or self._source.open(plan.make, plan.make.kind, plan.model)
            if problems := differences(plan, plan.read, opened.make, opened.model, plan.inputs):
                raise ValueError(f"the model is not the one of the job: {'; '.join(problems)}")
            self._worker = PartWorker(plan, opened.encoder(), store)
        return ray.get_runtime_context().get_node_id()

    def do(self, part: Part, turn: int) -> PartReport:
        """Does a part. Parts are read in the order of their turns, since a file may be readable in its order only."""
        with _errors_of_node():
            with self._turns:
                self._turns.wait_for(lambda: self._turn == turn)
            try:
                rows = self._worker.read(part)
            finally:
                with self._turns:
                    self._turn += 1
                    self._turns.notify_all()
            return self._worker.encode(part, rows, ignore_batch)

    def stop(self) -> None:
        """Has parts that are being encoded raise Stopped."""
        self._worker.stop()


class _FirstActor:
    """The first actor as an `Encoder`, for a sample; what it makes stays there."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """Has the actor encode values; only the counts come back, and `on_batch` is not called.

        Raises:
            RuntimeError: The actor cannot encode them, or died.
        """
        try:
            encoded: Encoded = ray.get(self._actor.encode.remote(values))
        except RayTaskError as error:
            raise _plain(error) from None
        except RayError as error:
            raise RuntimeError(f"the first actor died while it encoded a sample: {error}") from error
        return encoded

    def stop(self) -> None:
        """Does nothing: a sample is short."""

    def close(self) -> None:
        """The actor ends with the job."""


@contextmanager
def _errors_of_node() -> Iterator[None]:
    """Puts the node before what is wrong; a defect of the program keeps its traceback."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        node = f"{address} ({ray.get_runtime_context().get_node_id()[:8]})"
        raise RuntimeError(f"node {node}: {error}") from None


def _plain(error: RayTaskError) -> Exception:
    """What an actor raised, as if it had been raised here."""
    if isinstance(error.cause, Stopped):
        return Stopped()
    return RuntimeError(str(error.cause if type(error.cause) is RuntimeError else error))


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


class _Patience:
    """Warns now and then while no actor has been given room."""

    def __init__(self, options: RayOptions) -> None:
        self._needs = _needs(options)
        self._since = time.monotonic()

    def check(self) -> None:
        """Warns if that is due."""
        if time.monotonic() - self._since < _WARN_SECONDS:
            return
        self._since = time.monotonic()
        if not _capacity(self._needs):
            largest = {name: max((it.get(name, 0.0) for it in _nodes().values()), default=0.0) for name in self._needs}
            logger.warning(
                "no node has room for an actor, which takes %s; the largest nodes have %s. The job waits for one",
                _listed(self._needs),
                _listed(largest),
            )
        else:
            logger.warning("no actor is ready yet: one loads the model, or waits for other jobs of the cluster")


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _nodes() -> dict[str, dict[str, float]]:
    """The nodes that are alive, by their ids, with what they have."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {it["NodeID"]: it["Resources"] for it in nodes if it["Alive"]}


def _capacity(needs: Mapping[str, float]) -> int:
    """How many actors the cluster has room for, if nothing else runs there."""
    return sum(
        int(min((resources.get(name, 0.0) / amount for name, amount in needs.items() if amount), default=1))
        for resources in _nodes().values()
    )


@dataclass(eq=False, slots=True)
class _Member:
    """An actor of the pool, as the driver knows it.

    Attributes:
        actor: Its handle.
        node: The id of its node once it is ready for parts.
        left: Parts that it is to do next, in order.
        doing: Parts that it does.
        turns: How many parts it has been given.
    """

    actor: Any
    node: str | None = None
    left: deque[Part] = field(default_factory=deque)
    doing: list[Part] = field(default_factory=list)
    turns: int = 0


class _Queue:
    """The parts that no actor has been given, as runs: neighbours in a file, which are best read by one actor.

    A run has an owner or waits for one. An actor without a run takes half of the longest run of another; but a file
    that can only be read in order stays one run.
    """

    def __init__(self, plan: Plan, parts: Sequence[Part]) -> None:
        self._is_in_order = [it.in_order for it in plan.inputs]
        self.waiting: deque[deque[Part]] = deque()
        # Parts whose actor died. Each is done alone, so that the one that is to blame is known.
        self.suspects: deque[Part] = deque()
        for part in parts:
            if not self.waiting or self.waiting[-1][0].input != part.input:
                self.waiting.append(deque())
            self.waiting[-1].append(part)

    def takable(self, members: Sequence[_Member]) -> int:
        """How many more actors would each find something to do."""
        runs = sum(1 if self._in_order(run) else len(run) for run in self.waiting)
        return len(self.suspects) + runs + sum(len(it.left) for it in members if not self._in_order(it.left))

    def next_part(self, member: _Member, members: Sequence[_Member]) -> Part | None:
        """What an actor is to do next; None if there is nothing for it now."""
        if self.suspects:
            return None if member.doing else self.suspects.popleft()
        if not member.left:
            member.left = self._run(members)
        return member.left.popleft() if member.left else None

    def put_back(self, member: _Member, suspects: Sequence[Part]) -> None:
        """Takes back what an actor that died has left."""
        self.suspects.extend(suspects)
        if member.left:
            self.waiting.appendleft(member.left)

    def _run(self, members: Sequence[_Member]) -> deque[Part]:
        if self.waiting:
            return self.waiting.popleft()
        victim = max((it for it in members if not self._in_order(it.left)), key=lambda it: len(it.left), default=None)
        taken: deque[Part] = deque()
        if victim is not None:
            taken.extendleft(victim.left.pop() for _ in range((len(victim.left) + 1) // 2))
        return taken

    def _in_order(self, run: Sequence[Part]) -> bool:
        return bool(run) and self._is_in_order[run[0].input]


class RayRunner:
    """Does parts on the actors of a cluster that is joined; see `encserve_cli.job.run.Runner`."""

    def __init__(self, plan: Plan, store: Store, source: Source, options: RayOptions, first: Any = None) -> None:
        """Takes the job.

        Args:
            plan: What is done.
            store: Where the output goes, for every node.
            source: What an actor opens.
            options: What an actor gets of the cluster, and how many there are at most.
            first: An actor that has opened the source already.
        """
        self._plan = plan
        self._store = store
        self._source = source
        self._options = options
        # Each part comes with its call, so an actor does not need all of them.
        self._job = ray.put(dataclasses.replace(plan, parts=()))
        self._to_store = ray.put(store)
        self._members: list[_Member] = []
        self._refs: dict[Any, tuple[_Member, Part | None]] = {}  # what actors do; None for the start of one
        self._deaths: Counter[str] = Counter()  # of actors, by the parts that they did alone, or were among
        self._failed_starts = 0
        self._stopping = False  # no Event: `stop` may be called from a signal's handler
        if first is not None:
            self._add(first)

    def run(self, parts: Sequence[Part], on_batch: BatchProgress) -> Iterator[PartReport]:
        """See `Runner`."""
        queue = _Queue(self._plan, parts)
        patience = _Patience(self._options)
        left = len(parts)
        try:
            while left:
                self._staff(queue)
                self._give(queue, left)
                for report in self._reports(queue):
                    left -= 1
                    on_batch(report.part.rows, report.tokens, report.padded_tokens)
                    yield report
                if not any(it.node for it in self._members):
                    patience.check()
        finally:
            self.close()

    def stop(self) -> None:
        """See `Runner`."""
        self._stopping = True

    def close(self) -> None:
        """See `Runner`. What actors do is stopped and waited for a while, so that no upload is left in the middle."""
        doing = [ref for ref, (_, part) in self._refs.items() if part is not None]
        if doing:
            for member in self._members:
                if member.node is not None:
                    member.actor.stop.remote()
            ray.wait(doing, num_returns=len(doing), timeout=_STOP_SECONDS)
        for member in list(self._members):
            self._release(member)

    def _staff(self, queue: _Queue) -> None:
        """Starts actors while there is work for more, and ends those that there is none for.

        Without a limit there are as many as the cluster has room for; and as many again wait, one at least, since an
        autoscaler adds nodes only for what waits.
        """
        starting = [it for it in self._members if it.node is None]
        wanted = queue.takable(self._members) - len(starting)
        if wanted <= 0:
            for member in starting[wanted:] if wanted else ():
                self._release(member)
            return
        most = self._options.actors
        if most is None:
            most = _capacity(_needs(self._options)) + max(1, len(self._members) - len(starting))
        for _ in range(min(wanted, most - len(self._members))):
            self._add(_start(self._source, self._options))

    def _add(self, actor: Any) -> None:
        member = _Member(actor)
        self._members.append(member)
        self._refs[actor.begin.remote(self._job, self._to_store)] = member, None

    def _release(self, member: _Member) -> None:
        """Ends an actor."""
        self._members.remove(member)
        for ref in [ref for ref, (its, _) in self._refs.items() if its is member]:
            del self._refs[ref]
        with suppress(RayError):  # it is dead already
            ray.kill(member.actor)

    def _give(self, queue: _Queue, left: int) -> None:
        """Gives each actor parts to do, near the end fewer, so that all end at about the same time."""
        ready = [it for it in self._members if it.node is not None]
        at_once = min(_PARTS_AT_ONCE, math.ceil(left / max(1, len(ready))))
        for member in ready:
            while len(member.doing) < at_once and not self._is_alone(member):
                part = queue.next_part(member, ready)
                if part is None:
                    break
                self._refs[member.actor.do.remote(part, member.turns)] = member, part
                member.doing.append(part)
                member.turns += 1
            if not member.doing:
                self._release(member)

    def _is_alone(self, member: _Member) -> bool:
        """Whether an actor does a part that actors have died of."""
        return any(self._deaths[it.name] for it in member.doing)

    def _reports(self, queue: _Queue) -> Iterator[PartReport]:
        """Waits a moment for actors, and takes what they say."""
        done, _ = ray.wait(list(self._refs), timeout=_LOOK_SECONDS)
        if self._stopping:
            raise Stopped
        for ref in done:
            member, part = self._refs.pop(ref, (None, None))
            if member is None:
                continue  # its actor has died
            try:
                answer = ray.get(ref)
            except RayTaskError as error:
                raise _plain(error) from None
            except RayError as error:
                yield from self._lost(member, part, queue, error)
                continue
            if part is None:
                member.node, self._failed_starts = answer, 0
            else:
                member.doing.remove(part)
                yield answer

    def _lost(self, member: _Member, part: Part | None, queue: _Queue, error: RayError) -> Iterator[PartReport]:
        """Takes back what an actor that has died was doing; reports what it had written before.

        Raises:
            RuntimeError: That has been tried often enough.
        """
        self._release(member)
        if member.node is None:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_DEATHS:
                raise RuntimeError(
                    f"{_MAX_DEATHS} actors in a row died while they loaded the model, the last one so: {error}"
                )
            return
        written = self._store.names()
        done = [it for it in member.doing if f"{it.name}.parquet" in written]
        again = [it for it in member.doing if it not in done]
        if member.node in _nodes():  # otherwise the node has ended, and no part is to blame
            self._blame(again, error)
        queue.put_back(member, again)
        logger.info("an actor has died; %d parts are done again: %s", len(again), error)
        for it in done:
            rejected = (self._store.read(f"{REJECTED}/{it.name}.jsonl") or "").count("\n")
            yield PartReport(it, rejected, 0, 0, written[f"{it.name}.parquet"])

    def _blame(self, parts: Sequence[Part], error: RayError) -> None:
        for it in parts:
            self._deaths[it.name] += 1
            if self._deaths[it.name] >= _MAX_DEATHS:
                place = f"{self._plan.inputs[it.input].uri}, rows {it.first_row + 1:,} to {it.first_row + it.rows:,}"
                raise RuntimeError(
                    f"{it.name} ({place}): {_MAX_DEATHS} actors died while they did this part. Perhaps a node has too "
                    f"little memory for an actor; the last one died so: {error}"
                )
