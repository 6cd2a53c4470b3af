"""Tests of versions that are added, changed or removed while a server runs.

The engines are fake, and a manifest is one line of text.
"""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, FakeInspector
from fake_server import D_MODEL, SERVICE, Failed, FakeServer, StartServer, fake_model
from grpc_health.v1 import health_pb2
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.app import App
from encserve_server.errors import BundleError, DeviceError
from encserve_server.models.turns import FairThreadPool
from encserve_server.repository import manager
from encserve_server.repository.loaded import LoadedModel, ServedAlready
from encserve_server.repository.scan import find_slots
from encserve_server.settings import Settings

BAD, UNREADABLE, CRASHES, NO_DEVICE = "bad", "unreadable", "crashes", "no device"
ONE = [1, 2, 3]
INPUT = pb.Input(token_ids=pb.TokenIds(ids=ONE))


class Repository:
    """A model repository. Each manifest is one line of text: the content of the version, or a word for a failure.

    The server scans the repository repeatedly, but each scan waits until the test calls `look`.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.engines: list[FakeEngine] = []
        self.budgets: list[int | None] = []
        self.loads: list[str] = []
        self._looks = 0  # scans that the server has begun
        self._permits = threading.Semaphore(1)  # allows the scan at the start
        self._free = False
        self._find_slots = find_slots
        monkeypatch.setattr(manager, "find_slots", self._wait_and_find)
        # The number of calls of a fake `give_back`. The real function would take long in a process with many tests.
        self.collections = 0
        monkeypatch.setattr("encserve_server.system.memory.give_back", self._count_collection)

    def _wait_and_find(self, *args: Any) -> Any:
        self._looks += 1
        if not self._free:
            self._permits.acquire()
        return self._find_slots(*args)

    def _count_collection(self) -> None:
        self.collections += 1

    async def look(self, times: int = 2) -> None:
        """Let the server scan the repository `times` times.

        The server loads a new version after two scans that find the same files.
        """
        await until(lambda: self._looks >= 2)  # the scan at the start has begun, and the next scan waits
        before = self._looks
        self._permits.release(times)
        await until(lambda: self._looks >= before + times)

    async def look_now(self, server: FakeServer) -> None:
        """Request a scan, as SIGHUP does, and let the server scan."""
        await until(lambda: self._looks >= 2)
        server.app.manager.look_now()
        await self.look(2)  # first the waiting scan, then the requested scan

    def stop_waiting(self) -> None:
        self._free = True
        self._permits.release()

    def put(self, version: str, content: str, name: str = "tiny") -> Path:
        """Write or replace a version, and return the path of its manifest."""
        manifest = self.path / name / version / "manifest.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(content)
        return manifest

    def remove(self, version: str, name: str = "tiny") -> None:
        (self.path / name / version / "manifest.json").unlink()
        (self.path / name / version).rmdir()

    def load(self, directory: Path, settings: Settings, tokenize_pool: FairThreadPool, served: str) -> LoadedModel:
        """Load a fake model, or fail in the way that the manifest demands.

        The server calls this method instead of the real loader. The method checks the permission bits of the manifest,
        because root may read any file.
        """
        manifest = directory / "manifest.json"
        content = manifest.read_text() if manifest.stat().st_mode & 0o004 else UNREADABLE
        self.loads.append(f"{directory.parent.name}@{directory.name}: {content}")
        self.budgets.append(settings.max_batch_tokens if settings.tune_batches else 0)
        if content in (BAD, UNREADABLE):
            raise BundleError(f"{directory}: {content}")
        if content == CRASHES:
            raise ZeroDivisionError("a bug")
        if content == NO_DEVICE:
            raise DeviceError("--device cuda: none")
        if content.rjust(32, "0") == served:
            raise ServedAlready
        self.engines.append(FakeEngine(D_MODEL))
        inspector = FakeInspector(D_MODEL, 2, 32)
        return fake_model(
            directory,
            tokenize_pool,
            self.engines[-1],
            fingerprint=content.rjust(32, "0"),
            space_id=content[:1] * 32,
            load_inspector=lambda: inspector,
        )

    @property
    def closed(self) -> list[bool]:
        return [engine.closed for engine in self.engines]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return Repository(tmp_path / "repository", monkeypatch)


Serve = Callable[..., Awaitable[FakeServer]]


@pytest.fixture
async def serve(repository: Repository, start_server: StartServer) -> AsyncIterator[Serve]:
    """Return a function that starts a server on the repository."""

    async def start(**settings: Any) -> FakeServer:
        chosen = {"model_repository": repository.path, "model": (), "model_poll_seconds": 0.01, **settings}
        return await start_server(**{"load": repository.load, **chosen})

    yield start
    repository.stop_waiting()
    for engine in repository.engines:
        engine.let_go()


async def version_of(server: FakeServer, **request: Any) -> str:
    """Send a request. Return the version and content from the reply, such as `tiny@1 a`."""
    reply = pb.EncodeResponse.FromString(await server.call("Encode", pb.EncodeRequest(inputs=[INPUT], **request)))
    return f"{reply.model}@{reply.model_version} {reply.fingerprint.lstrip('0')}"


async def listed(server: FakeServer) -> str:
    """Return the served versions, such as `tiny@2* tiny@1`. A star marks the default version."""
    reply = pb.ListModelsResponse.FromString(await server.call("ListModels", pb.ListModelsRequest()))
    return " ".join(f"{it.name}@{it.version}{'*' if it.is_default else ''}" for it in reply.models)


async def lists(server: FakeServer, wanted: str) -> None:
    """Wait until exactly these versions are served."""

    async def are_served() -> bool:
        return await listed(server) == wanted

    await until(are_served)


def loads(server: FakeServer, outcome: str) -> float:
    return server.sample("encserve_model_loads_total", model="tiny", outcome=outcome)


@contextlib.asynccontextmanager
async def in_use(server: FakeServer, engine: FakeEngine, **request: Any) -> AsyncIterator["asyncio.Task[str]"]:
    """Send a call, and hold the call on the engine until the end of the block."""
    engine.hold()
    call = asyncio.create_task(version_of(server, **request))
    await asyncio.to_thread(engine.started.acquire)
    try:
        yield call
    finally:
        engine.let_go()
        await asyncio.gather(call, return_exceptions=True)


# Versions that replace others


async def test_a_new_version_replaces_the_old_one_in_replies_and_metrics(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    assert await version_of(server) == "tiny@1 a"
    before = {sample.name for family in server.app.registry.collect() for sample in family.samples}
    repository.put("2", "b")
    await repository.look()
    assert await version_of(server) == "tiny@2 b"
    assert await listed(server) == "tiny@2*"
    await until(lambda: repository.closed == [True, False])
    repository.stop_waiting()  # a scan that waits would block the thread that frees memory
    await until(lambda: repository.collections == 1)
    with pytest.raises(Failed, match="'1' of tiny; the versions are 2") as caught:
        await version_of(server, model_version="1")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert loads(server, "loaded") == 2

    def versions() -> set[str | None]:
        samples = [sample for family in server.app.registry.collect() for sample in family.samples]
        return {sample.labels.get("version") for sample in samples if sample.labels.get("model") == "tiny"}

    await until(lambda: versions() == {"2", None})
    assert {sample.name for family in server.app.registry.collect() for sample in family.samples} == before


async def test_a_version_is_replaced_in_place(repository: Repository, serve: Serve) -> None:
    """New content replaces the content of version 1, and the metrics of the version continue.

    Bad content changes nothing: the server continues with the served content.
    """
    manifest = repository.put("1", "a")
    server = await serve()
    assert await version_of(server) == "tiny@1 a"
    manifest.write_text("b")
    await repository.look()
    assert await version_of(server) == "tiny@1 b"
    await until(lambda: repository.closed == [True, False])
    manifest.write_text(BAD)
    await repository.look()
    assert await version_of(server) == "tiny@1 b"
    assert server.sample("encserve_tokens_total", model="tiny", version="1") == 3 * len(ONE)
    infos = [
        sample.labels["fingerprint"].lstrip("0")
        for family in server.app.registry.collect()
        if family.name == "encserve_model_info"
        for sample in family.samples
    ]
    assert infos == ["b"]


async def test_unchanged_content_is_never_loaded_twice(repository: Repository, serve: Serve) -> None:
    """Permissions may change without new content. For example, a volume may change the permissions at each mount."""
    manifest = repository.put("1", "a")
    repository.put("0", BAD)
    server = await serve(latest_versions=2)
    await repository.look(3)
    for mode in (0o600, 0o644):
        manifest.chmod(mode)
        await repository.look(3)
    assert repository.loads == ["tiny@1: a", "tiny@0: bad"]
    os.utime(manifest, ns=(0, 0))
    await repository.look(3)
    assert (repository.closed, await version_of(server)) == ([False], "tiny@1 a")
    assert await listed(server) == "tiny@1*"


async def test_a_folder_is_not_loaded_while_it_changes(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    repository.put("2", "half")
    await repository.look(1)
    repository.put("2", "whole")
    await repository.look(1)
    assert await version_of(server) == "tiny@1 a"
    await repository.look(1)
    assert await version_of(server) == "tiny@2 whole"
    assert repository.loads == ["tiny@1: a", "tiny@2: whole"]


async def test_a_requested_scan_loads_at_once_and_retries_refused_versions(
    repository: Repository, serve: Serve
) -> None:
    """A requested scan loads refused versions again, because a good version may have been refused.

    For example, the device may have had no free memory at the first load.
    """
    repository.put("1", "a")
    server = await serve(model_poll_seconds=0.0)  # no polls, so the repository is never overdue
    repository.stop_waiting()
    repository.put("2", BAD)
    for refused in (1, 2):
        server.app.manager.look_now()
        await until(lambda refused=refused: loads(server, "refused") == refused)  # type: ignore[misc]
    repository.put("3", "b")
    server.app.manager.look_now()
    await lists(server, "tiny@3*")
    assert server.sample("encserve_repository_overdue_seconds") == 0


PUTS = list[tuple[str, str]]  # model and version


@pytest.mark.parametrize(
    ("puts", "settings", "before", "added", "removed", "after"),
    [
        pytest.param(
            [("tiny", v) for v in "123"], {"latest_versions": 2}, "tiny@3* tiny@2",
            [("tiny", "10")], [], "tiny@10* tiny@3", id="the newest two",
        ),
        pytest.param(
            [("tiny", "1")], {"model": ("tiny@1",)}, "tiny@1*", [("tiny", "2")], [], "tiny@1*", id="a pinned one",
        ),
        pytest.param(
            [("tiny", "1")], {"model": ("tiny", "tiny@1")}, "tiny@1*",
            [("tiny", "2")], [], "tiny@2* tiny@1", id="the newest and a pinned one",
        ),
        pytest.param(
            [("tiny", "1"), ("tiny", "2")], {}, "tiny@2*", [], [("tiny", "2")], "tiny@1*", id="the newest removed",
        ),
        pytest.param(
            [("tiny", "1"), ("other", "1")], {}, "other@1* tiny@1",
            [], [("tiny", "1"), ("other", "1")], "other@1* tiny@1", id="the last one stays",
        ),
        pytest.param(
            [("one", "1"), ("two", "1")], {"model": ("one", "two@1")}, "one@1* two@1",
            [("one", "2")], [("two", "1")], "one@2* two@1", id="a missing model does not stop the others",
        ),
    ],
)  # fmt: skip
async def test_the_served_versions(
    repository: Repository, serve: Serve, puts: PUTS, settings: dict[str, Any], before: str, added: PUTS,
    removed: PUTS, after: str,
) -> None:  # fmt: skip
    for name, version in puts:
        repository.put(version, f"{name}{version}", name)
    server = await serve(**settings)
    assert await listed(server) == before
    for name, version in added:
        repository.put(version, f"{name}{version}", name)
    for name, version in removed:
        repository.remove(version, name)
    await repository.look(3)
    assert await listed(server) == after
    names = set()
    for it in after.replace("*", "").split():
        name, _, version = it.partition("@")
        assert await version_of(server, model=name, model_version=version) == f"{it} {name}{version}"
        is_default = name not in names  # the first version of each model is its default
        assert server.sample("encserve_model_default", model=name, version=version) == is_default
        names.add(name)
    assert len(repository.loads) == len(repository.engines), "a version was loaded twice"


async def test_a_new_model_never_becomes_the_default(repository: Repository, serve: Serve) -> None:
    """The name of the new model sorts first, but calls without a model name must still get the old model."""
    repository.put("1", "a", name="m")
    server = await serve()
    repository.put("1", "b", name="a")
    await repository.look()
    assert await listed(server) == "m@1* a@1"

    async def is_healthy() -> bool:
        with contextlib.suppress(Failed):
            check = health_pb2.HealthCheckRequest(service=f"{SERVICE}/a")
            data = await server.call("Check", check, "grpc.health.v1.Health")
            return health_pb2.HealthCheckResponse.FromString(data).status == health_pb2.HealthCheckResponse.SERVING
        return False

    await until(is_healthy)


async def test_the_old_name_of_a_renamed_model_is_served_until_the_server_ends(
    repository: Repository, serve: Serve
) -> None:
    """Only a restart ends the old name. The fake loader takes the name from the folder, so a rename is enough."""
    repository.put("1", "a", name="old")
    server = await serve()
    (repository.path / "old").rename(repository.path / "new")
    await repository.look(3)
    await lists(server, "old@1* new@1")
    assert await version_of(server, model="old") == "old@1 a"
    assert await version_of(server, model="new") == "new@1 a"


async def test_an_older_version_is_reported_in_the_log(
    repository: Repository, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Version names that are not numbers sort before numbers, so v4 is older than 3."""
    caplog.set_level("INFO")
    repository.put("2", "a")
    repository.put("3", "b")
    await serve()
    repository.put("v4", "c")
    await repository.look(3)
    records = [it for it in caplog.records if it.message == "a new version is older than the served one"]
    assert [vars(it)["version"] for it in records] == ["v4"]


async def test_no_budget_is_measured_while_a_model_serves(repository: Repository, serve: Serve) -> None:
    """While a model serves, no batch budget is measured, because a measurement needs all CPUs for seconds.

    A new version gets the batch budget of the previous version.
    """
    repository.put("1", "a", name="old")
    server = await serve()
    repository.put("2", "b", name="old")
    repository.put("1", "c", name="new")
    await repository.look()
    assert server.sample("encserve_batch_limit_tokens", model="old", version="2") == 512
    budgets = dict(zip(repository.loads, repository.budgets, strict=True))
    assert budgets == {"old@1: a": None, "old@2: b": 512, "new@1: c": 0}


# Bad versions


@pytest.mark.parametrize("content", [BAD, CRASHES, NO_DEVICE])
async def test_a_bad_version_changes_nothing_until_it_is_repaired(
    repository: Repository, serve: Serve, content: str
) -> None:
    repository.put("1", "a")
    server = await serve()
    repository.put("2", content)
    await repository.look(3)
    assert await version_of(server) == "tiny@1 a"
    assert repository.closed == [False]
    assert (loads(server, "loaded"), loads(server, "refused")) == (1, 1)
    assert server.sample("encserve_refused_versions", model="tiny") == 1
    repository.put("2", "repaired")
    await repository.look()
    assert await version_of(server) == "tiny@2 repaired"
    assert server.sample("encserve_refused_versions", model="tiny") == 0


async def test_the_server_starts_with_the_newest_good_version(repository: Repository, serve: Serve) -> None:
    """The start skips the bad version. The metrics report the bad version until its folder is removed."""
    repository.put("1", "a")
    repository.put("2", BAD)
    server = await serve()
    assert await version_of(server) == "tiny@1 a"
    await repository.look(3)
    assert (loads(server, "refused"), server.sample("encserve_refused_versions", model="tiny")) == (1, 1)
    repository.remove("2")
    await repository.look()
    assert server.sample("encserve_refused_versions", model="tiny") == 0


@pytest.mark.parametrize("repair", ["rights", "content with its old date"])
async def test_a_refused_version_is_retried_after_any_change(repository: Repository, serve: Serve, repair: str) -> None:
    repository.put("1", "a")
    manifest = repository.put("2", "good" if repair == "rights" else "evil")
    manifest.chmod(0o600)
    os.utime(manifest, ns=(0, 0))
    server = await serve()
    await repository.look(3)
    if repair == "rights":
        manifest.chmod(0o644)
    else:
        manifest.write_text("good")
        manifest.chmod(0o604)
        os.utime(manifest, ns=(0, 0))
    await repository.look(3)
    assert await version_of(server) == "tiny@2 good"
    assert repository.loads == ["tiny@2: unreadable", "tiny@1: a", "tiny@2: good"]


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        ({"1": BAD}, BundleError),
        ({"1": "a", "2": NO_DEVICE}, DeviceError),
        ({"1": "a", "2": CRASHES}, ZeroDivisionError),
    ],
)
async def test_errors_that_stop_the_start(
    repository: Repository, contents: dict[str, str], error: type[Exception]
) -> None:
    """A start fails if a model has no good version, or after an error that is not an error of a bundle."""
    for version, content in contents.items():
        repository.put(version, content)
    app = App(Settings(model_repository=repository.path, grpc_port=0, metrics_port=0), repository.load)
    with pytest.raises(error):
        await app.start()
    await app.stop()


async def test_a_refused_version_leaves_nothing_in_memory(repository: Repository, serve: Serve) -> None:
    """An exception refers to stack frames, and one frame refers to the engine.

    So the server must drop the exception.
    """
    engines: list[weakref.ref[FakeEngine]] = []

    def load(directory: Path, settings: Settings, tokenize_pool: FairThreadPool, served: str) -> LoadedModel:
        if directory.name == "2":
            engine = FakeEngine(D_MODEL)
            engines.append(weakref.ref(engine))
            raise BundleError("numbers that are not finite")
        return repository.load(directory, settings, tokenize_pool, served)

    repository.put("1", "a")
    await serve(load=load)
    repository.put("2", "b")
    await repository.look()
    await until(lambda: engines[0]() is None)  # the loading thread drops its last reference a moment later


@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_loaded_model_that_cannot_be_served_is_refused_and_closed(
    repository: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    repository.put("1", "a")
    server = await serve()
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith("encserve-engine"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        repository.put(version, "b")
        await repository.look(4)
    assert repository.loads == ["tiny@1: a", f"tiny@{version}: b"]
    assert repository.closed == [False, True]
    repository.put("1", "c", name="other")
    await repository.look()
    assert await listed(server) == "tiny@1* other@1"
    assert await version_of(server, model="tiny") == "tiny@1 a"
    assert server.sample("encserve_ready", model="tiny", version="1") == 1
    assert loads(server, "refused") == 1


# Folders that cannot be read


@pytest.mark.parametrize("folder", ["", "other", "tiny/3", "tiny/1"])
async def test_a_folder_that_cannot_be_read_changes_nothing(
    repository: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The folder may be lost+found, have wrong permissions, or be on a network volume that fails for a moment."""
    repository.put("1", "a")
    server = await serve()
    if folder in ("other", "tiny/3"):
        repository.put("1" if folder == "other" else "3", BAD, folder.partition("/")[0])
    scandir, closed = os.scandir, repository.path / folder

    def refuse(path: Any = ".") -> Any:
        if Path(path).is_relative_to(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        await repository.look()
        assert await listed(server) == "tiny@1*"
        assert len(repository.engines) == 1
        repository.put("2", "b")
        await repository.look()
        assert await listed(server) == ("tiny@2*" if folder else "tiny@1*")
    if folder != "tiny/3":
        repository.put("2", "b")
        await repository.look(3)
        assert (await listed(server)).startswith("tiny@2*")


@pytest.mark.parametrize("model", [("tiny@1",), ("tiny",), ()])
async def test_a_missing_model_makes_the_repository_overdue(
    repository: Repository, serve: Serve, model: tuple[str, ...]
) -> None:
    """If a served model disappears from the repository, a metric shows that the repository is overdue.

    Calls still succeed, so no caller reports the missing model.
    """
    repository.put("1", "a")
    server = await serve(model=model)
    repository.stop_waiting()

    def is_overdue() -> bool:
        return server.sample("encserve_repository_overdue_seconds") >= 0.1

    await until(lambda: not is_overdue())
    repository.remove("1")
    await until(is_overdue)
    repository.put("1", "a")
    await until(lambda: not is_overdue())


# Expectations of callers


@pytest.mark.parametrize(
    ("field", "reason", "kept", "changed"),
    [
        ("expected_fingerprint", "FINGERPRINT_MISMATCH", "a", "b"),
        ("expected_space_id", "SPACE_MISMATCH", "a again", "b"),
    ],
)
async def test_an_expected_fingerprint_or_space(
    repository: Repository, serve: Serve, field: str, reason: str, kept: str, changed: str
) -> None:
    """A second export of a model has another fingerprint and the same space_id."""
    repository.put("1", "a")
    server = await serve()

    def values(content: str) -> dict[str, str]:
        return {field: content.rjust(32, "0") if field == "expected_fingerprint" else content[0] * 32}

    repository.put("2", kept)
    await repository.look()
    assert await version_of(server, **values("a")) == f"tiny@2 {kept}"
    await until(lambda: repository.closed == [True, False] or kept == "a")
    repository.put("3", changed)
    await repository.look(3)
    await lists(server, "tiny@3*")
    inspect = pb.InspectRequest(input=INPUT, **values("a"))  # type: ignore[arg-type]
    for call in (version_of(server, **values("a")), server.inspect(inspect)):
        with pytest.raises(Failed, match=f"{values('a')[field]}.*tiny@3 has {values(changed)[field]}") as caught:
            await call
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    inspect = pb.InspectRequest(input=INPUT, **values(changed))  # type: ignore[arg-type]
    assert (await server.inspect(inspect))[0].header.model_version == "3"


async def test_a_bundle_without_a_space_id_fails_every_expectation(repository: Repository, serve: Serve) -> None:
    repository.put("1", "")
    server = await serve()
    with pytest.raises(Failed, match="tiny@1 has none"):
        await version_of(server, expected_space_id="a")


# Retirement


async def test_running_calls_finish_on_the_old_version(repository: Repository, serve: Serve) -> None:
    """While a call still runs on version 1, version 2 answers new calls. Only version 2 is the default and ready.

    Another model loads without waiting for the running call.
    """
    repository.put("1", "a")
    server = await serve()
    async with in_use(server, repository.engines[0]) as call:
        repository.put("2", "b")
        await repository.look()
        assert await version_of(server) == "tiny@2 b"
        for metric in ("encserve_model_default", "encserve_ready"):
            await until(
                lambda metric=metric: [server.sample(metric, model="tiny", version=it) for it in "12"] == [0, 1]  # type: ignore[misc]
            )
        repository.put("1", "n", name="new")
        await repository.look()
        assert await listed(server) == "tiny@2* new@1"
        assert not repository.engines[0].closed
    assert await call == "tiny@1 a"
    await until(lambda: repository.closed == [True, False, False])


async def test_a_stuck_engine_is_abandoned_after_the_grace_period(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve(grace_seconds=0.2)
    async with in_use(server, repository.engines[0]) as call:
        repository.put("2", "b")
        await repository.look()
        with pytest.raises(Failed, match="being unloaded") as caught:
            await call
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert await version_of(server) == "tiny@2 b"
    await until(lambda: repository.engines[0].closed)


async def test_a_stop_in_the_middle_of_a_replacement_answers_running_calls(
    repository: Repository, serve: Serve
) -> None:
    repository.put("1", "a")
    server = await serve()
    async with in_use(server, repository.engines[0]) as call:
        repository.put("2", "b")
        await repository.look()
        repository.stop_waiting()
        stopping = asyncio.create_task(server.app.stop())
        await asyncio.sleep(0.05)
    assert await call == "tiny@1 a"
    assert await stopping
    assert repository.closed == [True, True]


async def test_the_next_version_waits_for_the_retirement_of_its_own_model(repository: Repository, serve: Serve) -> None:
    """A new version is not loaded before a replaced version of the same model is unloaded.

    So a model has at most one extra version in memory. After the wait, the server loads the current content of the
    folder. Other models do not wait.
    """
    for name in "ab":
        repository.put("1", name, name=name)
    server = await serve()
    async with in_use(server, repository.engines[0], model="a"):
        repository.put("2", "aa", name="a")
        await repository.look()
        repository.put("3", "half", name="a")
        repository.put("2", "bb", name="b")
        await repository.look_now(server)
        await lists(server, "a@2* b@2")
        repository.put("3", "whole", name="a")
        assert repository.loads[2:] == ["a@2: aa", "b@2: bb"]
    repository.stop_waiting()
    await lists(server, "a@3* b@2")
    await until(lambda: repository.closed == [True, True, True, False, False])
    assert repository.loads[-1] == "a@3: whole"


async def test_a_version_serves_until_its_new_content_is_loaded(repository: Repository, serve: Serve) -> None:
    """Both versions get new content. While version 1 loads, the old content of version 2 answers calls.

    The metrics of version 2 count these calls.
    """
    gate = threading.Event()

    def load(directory: Path, settings: Settings, tokenize_pool: FairThreadPool, served: str) -> LoadedModel:
        if served and directory.name == "1":
            assert gate.wait(60)
        return repository.load(directory, settings, tokenize_pool, served)

    repository.put("1", "a")
    repository.put("2", "b")
    server = await serve(latest_versions=2, load=load)
    repository.put("1", "aa")
    repository.put("2", "bb")
    repository.stop_waiting()
    await until(lambda: loads(server, "loaded") == 3)
    labels = {"model": "tiny", "version": "2"}
    assert await version_of(server) == "tiny@2 b"
    assert server.sample("encserve_model_default", **labels) == 1
    assert server.sample("encserve_tokens_total", **labels) == len(ONE)
    gate.set()

    async def is_replaced() -> bool:
        return await version_of(server) == "tiny@2 bb"

    await until(is_replaced)


async def test_stuck_engines_are_abandoned_at_the_same_time(
    repository: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop waits for all stuck engines at the same time. With eight stuck engines, a stop takes less than 3.5 s."""
    monkeypatch.setattr(manager, "_CLOSE_SECONDS", 0.5)
    names = "abcdefgh"  # waiting for the engines one after another would take 8 x 0.5 s
    for name in names:
        repository.put("1", name, name=name)
    server = await serve(grace_seconds=0.0)
    repository.stop_waiting()
    async with contextlib.AsyncExitStack() as stack:
        calls = [
            await stack.enter_async_context(in_use(server, engine, model=name))
            for name, engine in zip(names, repository.engines, strict=True)
        ]
        async with asyncio.timeout(3.5):
            assert not await server.app.stop()
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(it) for it in results] == [Failed] * len(calls)


async def test_only_one_health_task_runs_after_changes_of_models(repository: Repository, serve: Serve) -> None:
    """After changes of models, only one health task runs. A second task would report SERVING during a stop."""
    repository.put("1", "a")
    await serve()
    repository.put("2", "b")
    await repository.look()
    assert [task.get_name() for task in asyncio.all_tasks()].count("encserve-health") == 1
