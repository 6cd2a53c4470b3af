"""Models come and go: what is new in the repository is loaded, takes over, and what it replaces is unloaded."""

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from encserve_server.errors import BundleError
from encserve_server.models.catalog import Catalog
from encserve_server.models.served import ServedModel
from encserve_server.models.turns import FairThreadPool
from encserve_server.repository.loaded import LoadedModel, ServedAlready
from encserve_server.repository.scan import Candidate, Slot, find_slots, require
from encserve_server.settings import Settings
from encserve_server.system import memory
from encserve_server.system.background import repeat
from encserve_server.system.clock import Clock
from encserve_server.telemetry.metrics import LoadOutcome, Metrics

logger = logging.getLogger(__name__)

Loader = Callable[[Path, Settings, FairThreadPool, str], LoadedModel]
Key = tuple[str, str]  # a model's name and version, or a slot's name and pin

# How long a model may take to close when it has no callers any more; a stuck engine never does.
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Served:
    """A model that is served, and the candidate that it was made of."""

    model: ServedModel
    candidate: Candidate


class ModelManager:
    """Keeps what is served in step with the model repository.

    The contract:

    - Of each model the newest `latest_versions` good versions are served, or the pinned one; the newest is its default.
    - A new version is loaded, verified and warmed up beside what is served, one at a time. Then, in one turn of the
      event loop, it takes over; a version that it pushes out of the newest is closed when the requests that it had are
      answered, or after `grace_seconds`. So for that time both are in memory. The next version of the same model is
      loaded after that, as soon as it is over; other models go on meanwhile.
    - A version that cannot be loaded is refused: logged, counted, and tried again only when something was done to a
      file of it, be it to its rights, or on `look_now`. What was served is served on, and the next older version counts
      as the newest. At the start, too: but a model of which no version is good stops the start.
    - A version that has vanished from the repository is unloaded if another takes its place. The last version of a
      model stays until the server ends, and so does the order of models: the default model never changes.
    - A folder that changes is left alone until two looks in a row find the same: somebody may still be copying. One
      that holds again what is served is verified and changes nothing, nor does one that cannot be read.

    Who owns what: everything here belongs to the event loop. Loading blocks, so it runs in `load_pool`.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        metrics: Metrics,
        *,
        clock: Clock,
        load: Loader,
        serve: Callable[[LoadedModel], ServedModel],
        on_models_change: Callable[[Sequence[ServedModel]], None],
        load_pool: Executor,
        tokenize_pool: FairThreadPool,
    ) -> None:
        """Follows no repository before `start`.

        Args:
            settings: Which models, how often to look, and what loading needs.
            catalog: Where models are published.
            metrics: Where loads are counted.
            clock: Tells whether a look is overdue.
            load: Turns a bundle's directory into a model, or raises ServedAlready if it has the fingerprint that is its
                last argument; blocks.
            serve: Puts a loaded model behind a scheduler; on the event loop.
            on_models_change: Called with all models that are served, whenever those change.
            load_pool: Where loading runs, one at a time.
            tokenize_pool: Where models tokenize.
        """
        self._settings = settings
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._load = load
        self._serve = serve
        self._on_models_change = on_models_change
        self._load_pool = load_pool
        self._tokenize_pool = tokenize_pool
        self._slots: dict[Key, list[Key]] = {}  # what each slot has chosen, the first its default; in their order
        self._served: dict[Key, _Served] = {}
        self._refused: dict[Key, tuple[Candidate, BundleError]] = {}
        self._seen: dict[Key, Candidate] = {}  # at the last look
        self._problems: list[str] = []  # what the last look did not find
        self._looked_at = math.inf  # when the last look had found all that is wanted
        self._postponed: dict[Key, bool] = {}  # slots that wait for a retirement, and whether a look was asked for
        self._asked = False  # for a look at once
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._retiring: list[ServedModel] = []  # replaced in place; retire when the next models are published
        self._retirements: dict[asyncio.Task[None], ServedModel] = {}

    async def start(self) -> None:
        """Loads what the repository holds, publishes it, and begins to follow the repository.

        Raises:
            StartupError: Something wanted is not there, or is not usable.
        """
        slots = require(self._settings.model_repository, await self._find_slots())
        for slot in slots:
            await self._choose(slot, settled=True)
            if not self._slots[slot.key]:
                raise self._refused[slot.candidates[0].key][1]
        self._publish()
        self._remember(slots)
        self._looked_at = self._clock.now()
        self._metrics.repository_overdue_seconds.set_function(self._overdue_seconds)
        self._task = asyncio.get_running_loop().create_task(
            repeat(self._look, self._settings.model_poll_seconds or None, wake=self._wake), name="encserve-models"
        )

    def look_now(self) -> None:
        """Has the repository looked at without waiting, and tries again what was refused."""
        self._asked = True
        self._wake.set()

    async def stop(self) -> None:
        """Follows the repository no more; what is served is served on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def close(self) -> bool:
        """Closes every model. Returns whether all ended; an engine that is stuck does not."""
        models = [
            *(served.model for served in self._served.values()),
            *self._retiring,
            *self._retirements.values(),
        ]
        # All at once: how long this takes must not depend on how many there are.
        return all(await asyncio.gather(*map(_close, models)))

    async def _look(self) -> None:
        """Brings what is served in step with the repository."""
        at_once, self._asked = self._asked, False
        if at_once:
            self._refused.clear()
        try:
            slots = await self._find_slots()
        except (BundleError, OSError) as error:
            self._tell_problems([str(error)])
            return
        gone = self._slots.keys() - {slot.key for slot in slots}
        self._tell_problems(
            [slot.problem for slot in slots if slot.problem]
            + [f"{self._settings.model_repository / name}: no bundle in it any more" for name, _ in sorted(gone)]
        )
        postponed, self._postponed = self._postponed, {}
        for slot in slots:
            if await self._choose(slot, settled=at_once or postponed.get(slot.key, False)):
                self._publish()
        self._remember(slots)
        if not self._problems and not self._postponed:
            self._looked_at = self._clock.now()

    def _remember(self, slots: Sequence[Slot]) -> None:
        """Notes down what this look found, for the next one, for metrics and for the log."""
        for slot in slots:
            for candidate in slot.candidates[slot.count :]:
                if self._seen and candidate.key not in self._seen:  # or it would seem to be ignored
                    name, version = candidate.key
                    logger.info("a version is older than what is served", extra={"model": name, "version": version})
        self._seen = {it.key: it for slot in slots for it in slot.candidates}
        for name in {name for name, _ in (*self._seen, *self._refused)}:
            bad = [key for key, (it, _) in self._refused.items() if key[0] == name and self._seen.get(key) == it]
            self._metrics.refused_versions.labels(name).set(len(bad))

    def _overdue_seconds(self) -> float:
        """How long ago a look should have found all that is wanted; called by the thread of the metrics page."""
        poll_seconds = self._settings.model_poll_seconds
        return max(self._clock.now() - self._looked_at - poll_seconds, 0.0) if poll_seconds else 0.0

    def _tell_problems(self, problems: list[str]) -> None:
        """Logs what is not as it should be, unless it was so at the look before."""
        for problem in problems:
            if problem not in self._problems:
                logger.error("not in the model repository; what is served stays", extra={"error": problem})
        if self._problems and not problems:
            logger.info("all that is wanted is in the model repository again")
        self._problems = problems

    async def _find_slots(self) -> list[Slot]:
        settings = self._settings
        return await asyncio.get_running_loop().run_in_executor(
            self._load_pool, find_slots, settings.model_repository, settings.model, settings.latest_versions
        )

    async def _choose(self, slot: Slot, *, settled: bool) -> bool:
        """Chooses the versions of one model, loading what is new. Returns whether anything changed.

        While a version of the model retires, nothing of it is loaded, and nothing changes.

        Args:
            slot: The model, with all versions that there are now.
            settled: Whether to load a version that was not there, or was another, at the last look.
        """
        chosen: list[Key] = []
        changed = False
        for candidate in slot.candidates:
            if len(chosen) == slot.count:
                break
            key = candidate.key
            if self._is_new(candidate) and (settled or self._seen.get(key) == candidate):
                if any(model.key[0] == slot.name for model in self._retirements.values()):
                    self._postponed[slot.key] = settled  # or there would be more than one too many in memory
                    return False
                changed |= await self._try(candidate)
            if key in self._served:  # perhaps still what its folder held before
                chosen.append(key)
        before = self._slots.get(slot.key, [])
        self._slots[slot.key] = chosen or before
        return changed or self._slots[slot.key] != before

    def _is_new(self, candidate: Candidate) -> bool:
        """Whether a candidate is neither served as it is nor known to be bad."""
        served, refused = self._served.get(candidate.key), self._refused.get(candidate.key)
        if served is not None and candidate.files in (None, served.candidate.files):
            return False  # other rights are no new version, nor is a volume that stutters
        return refused is None or refused[0] != candidate

    async def _try(self, candidate: Candidate) -> bool:
        """Loads a candidate and has it take over its own key. Returns whether it did."""
        name, _ = candidate.key
        self._metrics.zero_loads(name)
        if await self._load_and_serve(candidate):
            return True
        await asyncio.get_running_loop().run_in_executor(self._load_pool, memory.give_back)
        return False

    async def _load_and_serve(self, candidate: Candidate) -> bool:
        """Loads a candidate, and serves it unless it is bad, or what is served already."""
        name, version = key = candidate.key
        loop, pool = asyncio.get_running_loop(), self._load_pool
        loaded: LoadedModel | None = None
        served = self._served.get(key)
        try:
            # Not the event loop's own threads: those are waited for at the end, and a signal must not wait for a load.
            loaded = await loop.run_in_executor(
                pool,
                self._load,
                candidate.directory,
                self._settings_for(name),
                self._tokenize_pool,
                "" if served is None else served.model.bundle.fingerprint,
            )
            model = self._serve(loaded)
        except ServedAlready:
            assert served is not None  # noqa: S101 - only it has a fingerprint
            self._served[key] = _Served(served.model, candidate)
            return False
        except Exception as error:
            self._refuse(candidate, error)
            if loaded is not None:
                await loop.run_in_executor(pool, loaded.engine.close)
            return False
        self._metrics.model_loads.labels(name, LoadOutcome.LOADED.value).inc()
        if served is not None:
            logger.warning("a version was replaced in place", extra={"model": name, "version": version})
            self._retiring.append(served.model)
        self._served[key] = _Served(model, candidate)
        return True

    def _settings_for(self, name: str) -> Settings:
        """What a model is loaded with: while others are served nothing is measured, and its former budget is kept."""
        if not self._catalog.all():
            return self._settings
        budgets = [it.model.max_batch_tokens for (served, _), it in self._served.items() if served == name]
        if budgets:
            return dataclasses.replace(self._settings, max_batch_tokens=budgets[-1])
        return dataclasses.replace(self._settings, tune_batches=False)

    def _refuse(self, candidate: Candidate, error: Exception) -> None:
        """Counts and logs a version that cannot be loaded.

        Raises:
            Exception: It is no fault of the bundle and nothing is served yet: the server cannot start.
        """
        name, version = candidate.key
        self._metrics.model_loads.labels(name, LoadOutcome.REFUSED.value).inc()
        if not isinstance(error, BundleError) and not self._catalog.all():
            raise error
        # Without its traceback, which would hold what was loaded.
        refusal = type(error)(str(error)) if isinstance(error, BundleError) else BundleError(repr(error))
        self._refused[candidate.key] = candidate, refusal
        logger.error(
            "a model version was refused",
            extra={"model": name, "version": version, "error": str(refusal)},
            exc_info=None if isinstance(error, BundleError) else error,
        )

    def _publish(self) -> None:
        """Has what was chosen take over, and retires the rest."""
        keys = list(dict.fromkeys(key for chosen in self._slots.values() for key in chosen))
        models = [self._served[key].model for key in keys]
        retiring, self._retiring = self._retiring, []
        retiring += [self._served.pop(key).model for key in self._served.keys() - set(keys)]
        self._catalog.publish(models)
        self._on_models_change(models)
        for model in (*retiring, *models):
            self._metrics.model_default.labels(*model.key).set(self._catalog.is_default_version(model))
        logger.info("models", extra={"models": [f"{name}@{version}" for name, version in keys]})
        for model in retiring:
            task = asyncio.create_task(self._retire(model), name="encserve-retire")
            self._retirements[task] = model
            task.add_done_callback(self._retired)

    async def _retire(self, model: ServedModel) -> None:
        """Waits until a model's requests are answered, and closes it."""
        name, version = model.key
        try:
            async with asyncio.timeout(self._settings.grace_seconds):
                await model.unused()
        except TimeoutError:
            logger.warning("a model is closed with requests in flight", extra={"model": name, "version": version})
        closed = await _close(model)
        if model.key not in self._served:
            self._metrics.forget_model(*model.key)
        if closed:
            logger.info("model unloaded", extra={"model": name, "version": version})

    def _retired(self, task: "asyncio.Task[None]") -> None:
        """Gives back the memory of a model that has retired, and wakes the follower for versions that waited."""
        del self._retirements[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("unloading a model failed", exc_info=error)
        if self._postponed:
            self._wake.set()
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._load_pool.submit(memory.give_back)


async def _close(model: ServedModel) -> bool:
    """Closes a model, and says whether it did: an engine that is stuck does not."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await model.close()
    except TimeoutError:
        logger.error("an engine is stuck", extra={"model": model.key[0], "version": model.key[1]})
        return False
    return True
