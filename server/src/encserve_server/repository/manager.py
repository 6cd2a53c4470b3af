"""Follows the model repository: loads new versions, serves them, and unloads old versions."""

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
Key = tuple[str, str]  # the name and version of a model, or the name and pinned version of a slot

# How long to wait for a model to close. A stuck engine never closes.
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Served:
    """A served model, and the candidate from which it was loaded."""

    model: ServedModel
    candidate: Candidate


class ModelManager:
    """Serves the models that the model repository holds now.

    The contract:

    - For each model, the newest `latest_versions` good versions are served, or only the pinned version. The newest
    version is the model's default.
    - A new version is loaded, verified and warmed up while the old versions are served. Only one version loads at a
      time. Then the new version replaces an old version in one step of the event loop. The old version is closed when
      its requests are answered, or after `grace_seconds`. Until then both versions are in memory, and no further
      version of this model loads.
    - A version that cannot be loaded is refused, logged and counted. The server tries it again if a file or the rights
      of a file change, or on `look_now`. The served versions stay, and the next older version counts as the newest. If
      a model has no good version at the start, the server does not start.
    - A version that vanishes from the repository is unloaded if another version takes its place. The last version of a
      model stays until the server ends. The order of models stays too, so the default model never changes.
    - A folder that changes is loaded only after two looks in a row find the same files, because a copy may be running.
      If the folder's bundle is already served, the bundle is verified, and the served model stays. If a folder cannot
      be read, the served models stay.

    Call the methods on the event loop. Loading blocks, so it runs in `load_pool`.
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
        """Set the parts. `start` begins to follow the repository.

        Args:
            settings: The models to serve, the interval between looks, and the settings of loading.
            catalog: The models that calls can use. The manager updates the catalog.
            metrics: Counts loads.
            clock: Tells whether a look is overdue.
            load: Loads the bundle in a directory. It blocks. It raises ServedAlready if the last argument is the
                fingerprint of the bundle.
            serve: Gives a loaded model a scheduler; called on the event loop.
            on_models_change: Called after each change of the served models, with all served models.
            load_pool: The thread that loads models, one at a time.
            tokenize_pool: The threads that tokenize.
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
        self._slots: dict[Key, list[Key]] = {}  # the chosen versions of each slot, the default first
        self._served: dict[Key, _Served] = {}
        self._refused: dict[Key, tuple[Candidate, BundleError]] = {}
        self._seen: dict[Key, Candidate] = {}  # the candidates of the last look
        self._problems: list[str] = []  # the missing models and versions of the last look
        self._looked_at = math.inf  # the time of the last look that found everything
        self._postponed: dict[
            Key, bool
        ] = {}  # the slots that wait until an old version is closed; the value is the argument `settled` of `_choose`
        self._asked = False  # whether a look was requested
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._retiring: list[ServedModel] = []  # models to close when the next models are published
        self._retirements: dict[asyncio.Task[None], ServedModel] = {}

    async def start(self) -> None:
        """Load and publish the models of the repository. From then on, follow the repository.

        Raises:
            StartupError: A requested model is missing or not usable.
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
        """Look at the repository now, and try refused versions again."""
        self._asked = True
        self._wake.set()

    async def stop(self) -> None:
        """Stop following the repository. The served models stay."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def close(self) -> bool:
        """Close every model. Return whether all are closed; a stuck engine does not close."""
        models = [
            *(served.model for served in self._served.values()),
            *self._retiring,
            *self._retirements.values(),
        ]
        # All models close at the same time, so that the wait does not grow with the number of models.
        return all(await asyncio.gather(*map(_close, models)))

    async def _look(self) -> None:
        """Serve the models that the repository holds now."""
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
            + [f"{self._settings.model_repository / name}: the bundle is missing" for name, _ in sorted(gone)]
        )
        postponed, self._postponed = self._postponed, {}
        for slot in slots:
            if await self._choose(slot, settled=at_once or postponed.get(slot.key, False)):
                self._publish()
        self._remember(slots)
        if not self._problems and not self._postponed:
            self._looked_at = self._clock.now()

    def _remember(self, slots: Sequence[Slot]) -> None:
        """Remember the result of this look for the next look, the metrics and the log."""
        for slot in slots:
            for candidate in slot.candidates[slot.count :]:
                if self._seen and candidate.key not in self._seen:  # tell users why a new version is not served
                    name, version = candidate.key
                    logger.info("a new version is older than the served one", extra={"model": name, "version": version})
        self._seen = {it.key: it for slot in slots for it in slot.candidates}
        for name in {name for name, _ in (*self._seen, *self._refused)}:
            bad = [key for key, (it, _) in self._refused.items() if key[0] == name and self._seen.get(key) == it]
            self._metrics.refused_versions.labels(name).set(len(bad))

    def _overdue_seconds(self) -> float:
        """Return by how many seconds a complete look is overdue. The thread of the metrics page calls this."""
        poll_seconds = self._settings.model_poll_seconds
        return max(self._clock.now() - self._looked_at - poll_seconds, 0.0) if poll_seconds else 0.0

    def _tell_problems(self, problems: list[str]) -> None:
        """Log the problems that are new since the previous look."""
        for problem in problems:
            if problem not in self._problems:
                logger.error(
                    "models or versions are missing in the model repository; the served models stay",
                    extra={"error": problem},
                )
        if self._problems and not problems:
            logger.info("the model repository has all models again")
        self._problems = problems

    async def _find_slots(self) -> list[Slot]:
        settings = self._settings
        return await asyncio.get_running_loop().run_in_executor(
            self._load_pool, find_slots, settings.model_repository, settings.model, settings.latest_versions
        )

    async def _choose(self, slot: Slot, *, settled: bool) -> bool:
        """Choose the versions of one model, and load new ones. Return whether the choice has changed.

        While an old version of the model still answers requests, no version is loaded and the chosen versions stay.

        Args:
            slot: The model, with all its versions in the repository.
            settled: Whether to load a version even if its files have changed since the last look.
        """
        chosen: list[Key] = []
        changed = False
        for candidate in slot.candidates:
            if len(chosen) == slot.count:
                break
            key = candidate.key
            if self._is_new(candidate) and (settled or self._seen.get(key) == candidate):
                if any(model.key[0] == slot.name for model in self._retirements.values()):
                    self._postponed[slot.key] = settled  # a load now could put two old versions in memory
                    return False
                changed |= await self._try(candidate)
            if key in self._served:  # the served model may come from earlier files of the folder
                chosen.append(key)
        before = self._slots.get(slot.key, [])
        self._slots[slot.key] = chosen or before
        return changed or self._slots[slot.key] != before

    def _is_new(self, candidate: Candidate) -> bool:
        """Return whether a candidate is not served and not refused."""
        served, refused = self._served.get(candidate.key), self._refused.get(candidate.key)
        if served is not None and candidate.files in (None, served.candidate.files):
            return False  # the version is not new if only rights changed, or if the files cannot be read for a moment
        return refused is None or refused[0] != candidate

    async def _try(self, candidate: Candidate) -> bool:
        """Load a candidate. It replaces a served model of the same version. Return whether a new model is served."""
        name, _ = candidate.key
        self._metrics.zero_loads(name)
        if await self._load_and_serve(candidate):
            return True
        await asyncio.get_running_loop().run_in_executor(self._load_pool, memory.give_back)
        return False

    async def _load_and_serve(self, candidate: Candidate) -> bool:
        """Load a candidate, and serve it unless it is refused or already served."""
        name, version = key = candidate.key
        loop, pool = asyncio.get_running_loop(), self._load_pool
        loaded: LoadedModel | None = None
        served = self._served.get(key)
        try:
            # The event loop's default threads are not used, because the process would wait for the load before it ends.
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
            assert served is not None  # noqa: S101 - only a served model has a fingerprint
            self._served[key] = _Served(served.model, candidate)
            return False
        except Exception as error:
            self._refuse(candidate, error)
            if loaded is not None:
                await loop.run_in_executor(pool, loaded.engine.close)
            return False
        self._metrics.model_loads.labels(name, LoadOutcome.LOADED.value).inc()
        if served is not None:
            logger.warning("the bundle of a served version was replaced", extra={"model": name, "version": version})
            self._retiring.append(served.model)
        self._served[key] = _Served(model, candidate)
        return True

    def _settings_for(self, name: str) -> Settings:
        """Return the settings for a load. While models are served, no batch budget is measured; old budgets stay."""
        if not self._catalog.all():
            return self._settings
        budgets = [it.model.max_batch_tokens for (served, _), it in self._served.items() if served == name]
        if budgets:
            return dataclasses.replace(self._settings, max_batch_tokens=budgets[-1])
        return dataclasses.replace(self._settings, tune_batches=False)

    def _refuse(self, candidate: Candidate, error: Exception) -> None:
        """Count and log a version that cannot be loaded.

        Raises:
            Exception: The error is not about the bundle, and no model is served yet. So the server cannot start.
        """
        name, version = candidate.key
        self._metrics.model_loads.labels(name, LoadOutcome.REFUSED.value).inc()
        if not isinstance(error, BundleError) and not self._catalog.all():
            raise error
        # Store a copy of the error, because the traceback of the error would keep the loaded model in memory.
        refusal = type(error)(str(error)) if isinstance(error, BundleError) else BundleError(repr(error))
        self._refused[candidate.key] = candidate, refusal
        logger.error(
            "a model version was refused",
            extra={"model": name, "version": version, "error": str(refusal)},
            exc_info=None if isinstance(error, BundleError) else error,
        )

    def _publish(self) -> None:
        """Publish the chosen versions, and retire the others."""
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
        """Close a model when its requests are answered."""
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
        """Free the memory of a closed model, and look again at the repository, because versions may wait for this."""
        del self._retirements[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a model could not be unloaded", exc_info=error)
        if self._postponed:
            self._wake.set()
        with contextlib.suppress(RuntimeError):  # the pool is closed if the server has ended
            self._load_pool.submit(memory.give_back)


async def _close(model: ServedModel) -> bool:
    """Close a model. Return whether it is closed; a stuck engine does not close."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await model.close()
    except TimeoutError:
        logger.error("an engine is stuck", extra={"model": model.key[0], "version": model.key[1]})
        return False
    return True
