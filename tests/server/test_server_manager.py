"""Models that come and go while a server serves: a real server, fake engines, bundles that are one line of text."""

import asyncio
import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, FakeInspector
from fake_server import D_MODEL, SERVICE, Failed, FakeServer, StartServer, fake_model
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.app import App
from encserve_server.errors import BundleError, DeviceError
from encserve_server.models.served import ServedModel
from encserve_server.models.turns import TurnPool
from encserve_server.repository.loaded import LoadedModel, ServedAlready
from encserve_server.settings import Settings

BAD, CLOSED, CRASHES, NO_DEVICE = "bad", "closed", "crashes", "no device"
ONE = [1, 2, 3]


class Repository:
    """A model repository whose bundles are the text of their manifest: what they hold, or how they fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engines: list[FakeEngine] = []
        self.budgets: list[int | None] = []
        self.loads: list[str] = []

    def put(self, version: str, content: str, name: str = "tiny") -> Path:
        """Writes or replaces a version."""
        directory = self.path / name / version
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "manifest.json").write_text(content)
        return directory

    def remove(self, version: str, name: str = "tiny") -> None:
        directory = self.path / name / version
        (directory / "manifest.json").unlink()
        directory.rmdir()

    def load(self, directory: Path, settings: Settings, tokenize_pool: TurnPool, served: str) -> LoadedModel:
        """A loader for the server; what its rights keep from others it cannot read either, even where tests may."""
        manifest = directory / "manifest.json"
        content = manifest.read_text() if manifest.stat().st_mode & 0o004 else CLOSED
        self.loads.append(f"{directory.parent.name}@{directory.name}: {content}")
        self.budgets.append(settings.max_batch_tokens if settings.tune_batches else 0)
        if content in (BAD, CLOSED):
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


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


Serve = Callable[..., Any]


@pytest.fixture
async def serve(repository: Repository, start_server: StartServer) -> AsyncIterator[Serve]:
    """Starts a server on the repository; it looks there only when told to."""

    async def start(**settings: Any) -> FakeServer:
        chosen = {"model_repository": repository.path, "model": (), "model_poll_seconds": 0.0, **settings}
        return await start_server(**{"load": repository.load, **chosen})

    yield start
    for engine in repository.engines:
        engine.let_go()


async def look(server: FakeServer) -> None:
    """Has the server look, and waits until it has."""
    manager: Any = server.app.manager
    done, looking = asyncio.Event(), manager._look

    async def look_and_tell(*, at_once: bool) -> None:
        try:
            await looking(at_once=at_once)
        finally:
            done.set()

    manager._look = look_and_tell
    manager.look_now()
    async with asyncio.timeout(60):
        await done.wait()
    manager._look = looking


async def retired() -> None:
    """Waits until no model is about to be unloaded."""
    while any(task.get_name() == "encserve-retire" for task in asyncio.all_tasks()):
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def in_use(model: ServedModel) -> Iterator[None]:
    """As if a call used the model."""
    model.enter()
    try:
        yield
    finally:
        model.leave()


async def version_of(server: FakeServer, **request: Any) -> str:
    """The version and content that a request gets, as the reply names them."""
    data = pb.EncodeRequest(inputs=[pb.Input(token_ids=pb.TokenIds(ids=ONE))], **request)
    reply = pb.EncodeResponse.FromString(await server.call("Encode", data))
    return f"{reply.model}@{reply.model_version} {reply.fingerprint.lstrip('0')}"


async def listed(server: FakeServer) -> list[str]:
    reply = pb.ListModelsResponse.FromString(await server.call("ListModels", pb.ListModelsRequest()))
    return [f"{it.name}@{it.version}{'*' if it.is_default else ''}" for it in reply.models]


def loads(server: FakeServer, outcome: str, name: str = "tiny") -> float:
    return server.sample("encserve_model_loads_total", model=name, outcome=outcome)


async def test_a_new_version_takes_over_and_the_old_one_is_closed(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    assert await version_of(server) == "tiny@1 a"
    repository.put("2", "b")
    await look(server)
    assert await version_of(server) == "tiny@2 b"
    assert await listed(server) == ["tiny@2*"]
    await retired()
    assert [engine.closed for engine in repository.engines] == [True, False]
    with pytest.raises(Failed, match="no version '1' of tiny; there are 2") as caught:
        await version_of(server, model_version="1")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert loads(server, "loaded") == 2


async def test_nothing_is_loaded_again_that_did_not_change(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    repository.put("0", BAD)
    server = await serve(latest_versions=2)
    for _ in range(3):
        await server.app.manager._look(at_once=False)
    assert repository.loads == ["tiny@1: a", "tiny@0: bad"]


async def test_requests_in_flight_finish_on_the_old_version(repository: Repository, serve: Serve) -> None:
    """While they do, new ones are answered by the new version, and the old engine is not closed."""
    repository.put("1", "a")
    server = await serve()
    old = repository.engines[0]
    old.hold()
    calls = [asyncio.create_task(version_of(server)) for _ in range(10)]
    while server.sample("encserve_in_flight_requests") < 10:
        await asyncio.sleep(0.01)
    repository.put("2", "b")
    server.app.manager.look_now()
    while await listed(server) != ["tiny@2*"]:
        await asyncio.sleep(0.01)
    assert await version_of(server) == "tiny@2 b"
    assert not old.closed
    old.let_go()
    assert await asyncio.gather(*calls) == ["tiny@1 a"] * 10
    while not old.closed:
        await asyncio.sleep(0.01)


async def test_an_engine_that_does_not_finish_is_given_up(repository: Repository, serve: Serve) -> None:
    """After the grace period its callers are told to go elsewhere; the new version serves all the same."""
    repository.put("1", "a")
    server = await serve(grace_seconds=0.2)
    old = repository.engines[0]
    old.hold()
    call = asyncio.create_task(version_of(server))
    await asyncio.to_thread(old.started.acquire)
    repository.put("2", "b")
    looking = asyncio.create_task(look(server))
    with pytest.raises(Failed, match="being unloaded") as caught:
        await call
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert await version_of(server) == "tiny@2 b"
    old.let_go()
    await looking
    await retired()
    assert old.closed


@pytest.mark.parametrize("content", [BAD, CRASHES, NO_DEVICE])
async def test_a_bad_version_changes_nothing(repository: Repository, serve: Serve, content: str) -> None:
    repository.put("1", "a")
    server = await serve()
    repository.put("2", content)
    await look(server)
    assert await version_of(server) == "tiny@1 a"
    assert not repository.engines[0].closed
    assert (loads(server, "loaded"), loads(server, "refused")) == (1, 1)
    assert server.sample("encserve_refused_versions", model="tiny") == 1
    repository.put("2", "mended")
    await look(server)
    assert await version_of(server) == "tiny@2 mended"
    assert server.sample("encserve_refused_versions", model="tiny") == 0


async def test_a_bad_version_that_is_taken_away_is_no_longer_told(repository: Repository, serve: Serve) -> None:
    """Not before: it may be weeks until the next restart finds it."""
    repository.put("1", "a")
    repository.put("2", BAD)
    server = await serve()
    for _ in range(3):
        await server.app.manager._look(at_once=False)
        assert server.sample("encserve_refused_versions", model="tiny") == 1
    repository.remove("2")
    await server.app.manager._look(at_once=False)
    assert server.sample("encserve_refused_versions", model="tiny") == 0


async def test_a_new_folder_that_is_no_newer_is_told(
    repository: Repository, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Words sort before numbers, so v4 is older than 3; who put it there sees why nothing happens."""
    caplog.set_level("INFO")
    repository.put("2", "a")
    repository.put("3", "b")
    server = await serve()
    repository.put("v4", "c")
    for _ in range(3):
        await server.app.manager._look(at_once=False)
    told = [record for record in caplog.records if record.message == "a version is older than what is served"]
    assert [vars(record)["version"] for record in told] == ["v4"]


async def test_a_refused_version_is_tried_again_when_asked_to(repository: Repository, serve: Serve) -> None:
    """The bundle may be good, and the device have been full."""
    repository.put("1", "a")
    server = await serve()
    repository.put("2", BAD)
    for _ in range(3):
        await look(server)
    assert loads(server, "refused") == 3


async def test_a_refused_version_is_tried_again_once_its_rights_were_changed(
    repository: Repository, serve: Serve
) -> None:
    repository.put("1", "a")
    manifest = repository.put("2", "b") / "manifest.json"
    manifest.chmod(0o600)
    server = await serve()
    for _ in range(3):
        await server.app.manager._look(at_once=False)
    manifest.chmod(0o644)
    for _ in range(3):
        await server.app.manager._look(at_once=False)
    assert await version_of(server) == "tiny@2 b"
    assert repository.loads == ["tiny@2: closed", "tiny@1: a", "tiny@2: b"]


async def test_a_refused_version_is_tried_again_once_mended_though_its_date_was_kept(
    repository: Repository, serve: Serve
) -> None:
    repository.put("1", "a")
    manifest = repository.put("2", BAD) / "manifest.json"
    os.utime(manifest, ns=(0, 0))
    server = await serve()
    manifest.write_text("mnd")  # in place, and as long as before
    os.utime(manifest, ns=(0, 0))
    for _ in range(3):
        await server.app.manager._look(at_once=False)
    assert await version_of(server) == "tiny@2 mnd"
    assert repository.loads == ["tiny@2: bad", "tiny@1: a", "tiny@2: mnd"]


async def test_other_rights_of_what_is_served_load_nothing(repository: Repository, serve: Serve) -> None:
    """A volume whose rights are set anew for every pod that mounts it must not double everybody's memory."""
    manifest = repository.put("1", "a") / "manifest.json"
    server = await serve()
    for mode in (0o600, 0o644):
        manifest.chmod(mode)
        for _ in range(3):
            await server.app.manager._look(at_once=False)
    assert repository.loads == ["tiny@1: a"]


async def test_a_folder_that_still_changes_is_left_alone(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    manager = server.app.manager
    await manager._look(at_once=False)
    repository.put("2", "half")
    await manager._look(at_once=False)
    repository.put("2", "whole")
    await manager._look(at_once=False)
    assert await version_of(server) == "tiny@1 a"
    await manager._look(at_once=False)
    assert await version_of(server) == "tiny@2 whole"
    assert repository.loads == ["tiny@1: a", "tiny@2: whole"]


async def test_the_repository_is_followed_without_being_asked(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve(model_poll_seconds=0.02)
    repository.put("2", "b")
    while await version_of(server) != "tiny@2 b":
        await asyncio.sleep(0.01)


async def test_a_version_replaced_in_place(repository: Repository, serve: Serve) -> None:
    """The new content serves under the old name, the old engine is closed, and the metrics go on."""
    repository.put("1", "a")
    server = await serve()
    assert await version_of(server) == "tiny@1 a"
    repository.put("1", "b")
    await look(server)
    assert await version_of(server) == "tiny@1 b"
    await retired()
    assert [engine.closed for engine in repository.engines] == [True, False]
    assert server.sample("encserve_tokens_total", model="tiny", version="1") == 2 * len(ONE)
    infos = [
        sample.labels["fingerprint"].lstrip("0")
        for family in server.app.registry.collect()
        if family.name == "encserve_model_info"
        for sample in family.samples
    ]
    assert infos == ["b"]


async def test_a_bad_replacement_in_place_leaves_the_old_content(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    repository.put("1", BAD)
    await look(server)
    assert await version_of(server) == "tiny@1 a"


async def test_the_newest_n_are_served(repository: Repository, serve: Serve) -> None:
    for version in "123":
        repository.put(version, f"v{version}")
    server = await serve(latest_versions=2)
    assert await listed(server) == ["tiny@3*", "tiny@2"]
    repository.put("10", "v10")
    await look(server)
    assert await listed(server) == ["tiny@10*", "tiny@3"]
    assert await version_of(server, model_version="3") == "tiny@3 v3"
    default = {
        version: server.sample("encserve_model_default", model="tiny", version=version) for version in ("10", "3")
    }
    assert default == {"10": 1, "3": 0}


async def test_a_pinned_version_stays(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve(model=("tiny@1",))
    repository.put("2", "b")
    await look(server)
    assert await listed(server) == ["tiny@1*"]


async def test_the_newest_beside_a_pinned_one(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve(model=("tiny", "tiny@1"))
    assert await listed(server) == ["tiny@1*"]
    repository.put("2", "b")
    await look(server)
    assert await listed(server) == ["tiny@2*", "tiny@1"]
    assert len(repository.loads) == 2


async def test_taking_the_newest_away_goes_back(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    repository.put("2", "b")
    server = await serve()
    repository.remove("2")
    await look(server)
    assert await version_of(server) == "tiny@1 a"


async def test_the_last_version_stays_whatever_becomes_of_its_folder(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    repository.put("1", "b", name="other")
    server = await serve()
    repository.remove("1")
    await look(server)
    repository.remove("1", name="other")
    await look(server)
    assert await listed(server) == ["other@1*", "tiny@1"]
    assert await version_of(server, model="tiny") == "tiny@1 a"


async def test_a_new_model_is_served_but_never_by_default(repository: Repository, serve: Serve) -> None:
    """By name it comes first; callers who name no model must not get another one from one day to the next."""
    repository.put("1", "a", name="m")
    server = await serve()
    repository.put("1", "b", name="a")
    await look(server)
    assert await listed(server) == ["m@1*", "a@1"]
    channel: Any = server.channel
    stub: Any = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                response = await stub.Check(health_pb2.HealthCheckRequest(service=f"{SERVICE}/a"))
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            await asyncio.sleep(0.01)


async def test_the_start_takes_the_newest_good_version(repository: Repository, serve: Serve) -> None:
    """As the replicas do that were there before the bad one came."""
    repository.put("1", "a")
    repository.put("2", BAD)
    server = await serve()
    assert await version_of(server) == "tiny@1 a"
    assert loads(server, "refused") == 1


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        ({"1": BAD}, BundleError),
        ({"1": "a", "2": NO_DEVICE}, DeviceError),
        ({"1": "a", "2": CRASHES}, ZeroDivisionError),
    ],
)
async def test_what_stops_the_start(repository: Repository, contents: dict[str, str], error: type[Exception]) -> None:
    """A model without any good version, and whatever is no bundle's fault."""
    for version, content in contents.items():
        repository.put(version, content)
    app = App(Settings(model_repository=repository.path, grpc_port=0, metrics_port=0), repository.load)
    with pytest.raises(error):
        await app.start()
    await app.stop()


async def test_while_it_serves_nothing_is_measured(repository: Repository, serve: Serve) -> None:
    """Measuring takes seconds of every CPU. A new version of a model gets the budget of the one before."""
    repository.put("1", "a", name="old")
    server = await serve()
    repository.put("2", "b", name="old")
    repository.put("1", "c", name="new")
    await look(server)
    budget = server.sample("encserve_batch_limit_tokens", model="old", version="2")
    assert budget == 512
    assert dict(zip(repository.loads, repository.budgets, strict=True)) == {
        "old@1: a": None,
        "old@2: b": budget,
        "new@1: c": 0,
    }


async def test_metrics_of_a_version_go_with_it(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    before = {sample.name for family in server.app.registry.collect() for sample in family.samples}
    repository.put("2", "b")
    await look(server)
    await retired()
    samples = [sample for family in server.app.registry.collect() for sample in family.samples]
    assert {sample.labels.get("version") for sample in samples if sample.labels.get("model") == "tiny"} == {"2", None}
    assert {sample.name for sample in samples} == before


async def test_a_stop_in_the_middle_of_a_switch(repository: Repository, serve: Serve) -> None:
    """Both engines are closed, and what was in flight is answered."""
    repository.put("1", "a")
    server = await serve()
    old = repository.engines[0]
    old.hold()
    call = asyncio.create_task(version_of(server))
    await asyncio.to_thread(old.started.acquire)
    repository.put("2", "b")
    server.app.manager.look_now()
    while await listed(server) != ["tiny@2*"]:
        await asyncio.sleep(0.01)
    stopping = asyncio.create_task(server.app.stop())
    await asyncio.sleep(0.05)
    old.let_go()
    assert await call == "tiny@1 a"
    assert await stopping
    assert [engine.closed for engine in repository.engines] == [True, True]


async def test_a_repository_that_cannot_be_read_changes_nothing(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    repository.path.rename(repository.path.with_name("moved"))
    await look(server)
    assert await version_of(server) == "tiny@1 a"
    repository.path.with_name("moved").rename(repository.path)
    repository.put("2", "b")
    await look(server)
    assert await version_of(server) == "tiny@2 b"


async def test_an_expected_fingerprint(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    expected = "a".rjust(32, "0")
    assert await version_of(server, expected_fingerprint=expected) == "tiny@1 a"
    repository.put("2", "b")
    await look(server)
    with pytest.raises(Failed, match=f"'{expected}' is expected, but tiny@2 has {'b'.rjust(32, '0')}") as caught:
        await version_of(server, expected_fingerprint=expected)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")
    inspect = pb.InspectRequest(input=pb.Input(token_ids=pb.TokenIds(ids=ONE)), expected_fingerprint=expected)
    with pytest.raises(Failed, match="is expected, but tiny@2 has"):
        await server.inspect(inspect)
    inspect.expected_fingerprint = "b".rjust(32, "0")
    assert (await server.inspect(inspect))[0].header.model_version == "2"


async def test_an_expected_space(repository: Repository, serve: Serve) -> None:
    """It stays when the same model is exported again, and goes with the model."""
    repository.put("1", "a")
    server = await serve()
    expected = "a" * 32
    repository.put("2", "a again")
    await look(server)
    await retired()
    assert await version_of(server, expected_space_id=expected) == "tiny@2 a again"
    repository.put("3", "b")
    await look(server)
    message = f"expected_space_id: '{expected}' is expected, but tiny@3 has {'b' * 32}: .*; name the version"
    with pytest.raises(Failed, match=message) as caught:
        await version_of(server, expected_space_id=expected)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SPACE_MISMATCH")
    inspect = pb.InspectRequest(input=pb.Input(token_ids=pb.TokenIds(ids=ONE)), expected_space_id=expected)
    with pytest.raises(Failed, match="is expected, but tiny@3 has"):
        await server.inspect(inspect)
    inspect.expected_space_id = "b" * 32
    assert (await server.inspect(inspect))[0].header.space_id == inspect.expected_space_id


async def test_a_bundle_from_before_there_were_spaces(repository: Repository, serve: Serve) -> None:
    repository.put("1", "")
    server = await serve()
    with pytest.raises(Failed, match=r"but tiny@1 has none \(export it again\)"):
        await version_of(server, expected_space_id="a")


async def test_a_refused_version_leaves_nothing_in_memory(
    repository: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error knows the frames that it came through, and those the engine that failed to warm up."""
    held: list[weakref.ref[FakeEngine]] = []

    def load(directory: Path, settings: Settings, tokenize_pool: TurnPool, served: str) -> LoadedModel:
        if (directory / "manifest.json").read_text() == "not finite":
            engine = FakeEngine(D_MODEL)
            held.append(weakref.ref(engine))
            raise BundleError("numbers that are not finite")
        return repository.load(directory, settings, tokenize_pool, served)

    repository.put("1", "a")
    server = await serve()
    monkeypatch.setattr(server.app.manager, "_load", load)
    repository.put("2", "not finite")
    await look(server)
    while held[0]() is not None:  # the thread drops its last reference a moment later
        await asyncio.sleep(0.01)


async def test_a_missing_model_does_not_hold_up_the_others(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a", name="one")
    repository.put("1", "b", name="two")
    server = await serve(model=("one", "two@1"))
    repository.remove("1", name="two")
    repository.put("2", "c", name="one")
    await look(server)
    assert await listed(server) == ["one@2*", "two@1"]


@pytest.mark.parametrize("model", [("tiny@1",), ("tiny",), ()])
async def test_a_repository_that_cannot_be_followed_is_told(
    repository: Repository, serve: Serve, model: tuple[str, ...]
) -> None:
    """What is wanted is missing: nothing fails, so a number has to say it."""
    repository.put("1", "a")
    server = await serve(model=model, model_poll_seconds=0.02)
    while server.sample("encserve_repository_overdue_seconds") >= 1:  # at first, or where a look comes late
        await asyncio.sleep(0.02)
    repository.remove("1")
    while server.sample("encserve_repository_overdue_seconds") < 1:
        await asyncio.sleep(0.02)
    repository.put("1", "a")
    while server.sample("encserve_repository_overdue_seconds") >= 1:
        await asyncio.sleep(0.02)


async def test_without_polling_nothing_is_overdue(repository: Repository, serve: Serve) -> None:
    repository.put("1", "a")
    server = await serve()
    await asyncio.sleep(0.02)
    assert server.sample("encserve_repository_overdue_seconds") == 0


@pytest.mark.parametrize("what", ["a model's folder", "a version's folder", "the served version's folder"])
async def test_a_folder_that_cannot_be_read_changes_nothing(
    repository: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Somebody's upload with other rights, lost+found, or a network volume that stutters."""
    repository.put("1", "a")
    server = await serve()
    if what == "a model's folder":
        closed = repository.put("1", BAD, name="other").parent
    elif what == "a version's folder":
        closed = repository.put("3", BAD)
    else:
        closed = repository.path / "tiny" / "1"
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(path).is_relative_to(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    await look(server)
    assert await listed(server) == ["tiny@1*"]
    assert len(repository.engines) == 1
    repository.put("2", "b")
    await look(server)
    assert await listed(server) == ["tiny@2*"]


async def test_health_is_followed_once_however_often_models_change(repository: Repository, serve: Serve) -> None:
    """A second follower would say ready again in the middle of the end."""
    repository.put("1", "a")
    server = await serve()
    repository.put("2", "b")
    await look(server)
    assert [task.get_name() for task in asyncio.all_tasks()].count("encserve-health") == 1


@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_model_that_cannot_be_served_changes_nothing(
    repository: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """It was loaded, but no thread can be started: refused like any other, closed, and not tried again."""
    repository.put("1", "a")
    server = await serve()
    manager: Any = server.app.manager
    serving = manager._serve

    def fail(loaded: LoadedModel) -> None:
        del loaded
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(manager, "_serve", fail)
    repository.put(version, "b")
    for _ in range(3):
        await manager._look(at_once=False)
    assert repository.loads == ["tiny@1: a", f"tiny@{version}: b"]
    assert [engine.closed for engine in repository.engines] == [False, True]
    monkeypatch.setattr(manager, "_serve", serving)
    repository.put("1", "c", name="other")
    await manager._look(at_once=False)
    await manager._look(at_once=False)
    assert await listed(server) == ["tiny@1*", "other@1"]
    assert await version_of(server, model="tiny") == "tiny@1 a"
    assert server.sample("encserve_ready", model="tiny", version="1") == 1
    assert loads(server, "refused") == 1


async def test_the_same_content_anew_changes_nothing(repository: Repository, serve: Serve) -> None:
    """A file that was only touched, or a folder that was copied back."""
    directory = repository.put("1", "a")
    server = await serve()
    os.utime(directory / "manifest.json", ns=(0, 0))
    for _ in range(3):
        await look(server)
    assert [engine.closed for engine in repository.engines] == [False]
    assert await version_of(server) == "tiny@1 a"
    assert not [line for line in await listed(server) if line != "tiny@1*"]


async def test_a_model_that_retires_holds_up_no_other(repository: Repository, serve: Serve) -> None:
    """And says meanwhile that it is neither the default nor ready, so that nothing is counted twice."""
    repository.put("1", "a")
    server = await serve()
    with in_use(server.app.catalog.all()[0]):
        repository.put("2", "b")
        await look(server)
        for metric in ("encserve_model_default", "encserve_ready"):
            await_value = {"1": 0, "2": 1}
            while {it: server.sample(metric, model="tiny", version=it) for it in "12"} != await_value:
                await asyncio.sleep(0.01)
        repository.put("1", "n", name="new")
        await look(server)
        assert await listed(server) == ["tiny@2*", "new@1"]
        assert not repository.engines[0].closed
    while not repository.engines[0].closed:
        await asyncio.sleep(0.01)


async def test_the_next_version_waits_for_the_one_that_retires_and_other_models_do_not(
    repository: Repository, serve: Serve
) -> None:
    """Of one model there is never more than one too many in memory; the repository need not be looked at again."""
    repository.put("1", "a", name="a")
    repository.put("1", "b", name="b")
    server = await serve()
    with in_use(server.app.catalog.all()[0]):
        repository.put("2", "aa", name="a")
        await look(server)
        repository.put("3", "aaa", name="a")
        repository.put("2", "bb", name="b")
        await look(server)
        assert await listed(server) == ["a@2*", "b@2"]
        assert repository.loads[2:] == ["a@2: aa", "b@2: bb"]
    while await listed(server) != ["a@3*", "b@2"]:
        await asyncio.sleep(0.01)
    assert repository.engines[0].closed
    await retired()
    assert [engine.closed for engine in repository.engines] == [True, True, True, False, False]


async def test_a_version_that_waits_for_a_retirement_may_still_change(repository: Repository, serve: Serve) -> None:
    """SIGHUP loads at once, and without polls the server would not look again."""
    repository.put("1", "a")
    server = await serve()
    with in_use(server.app.catalog.all()[0]):
        repository.put("2", "b")
        await look(server)
        repository.put("3", "half")
        await look(server)
        repository.put("3", "whole")
    while await listed(server) != ["tiny@3*"]:
        await asyncio.sleep(0.01)
    assert await version_of(server) == "tiny@3 whole"


async def test_a_version_replaced_in_place_is_counted_until_it_is_gone(repository: Repository, serve: Serve) -> None:
    """While the second of two is still being loaded, callers get the old first one, and it counts."""
    repository.put("1", "a")
    repository.put("2", "b")
    server = await serve(latest_versions=2)
    gate = threading.Event()
    loading = repository.load

    def load(directory: Path, settings: Settings, tokenize_pool: TurnPool, served: str) -> LoadedModel:
        if directory.name == "1":
            gate.wait(60)
        return loading(directory, settings, tokenize_pool, served)

    server.app.manager._load = load
    repository.put("1", "aa")
    repository.put("2", "bb")
    server.app.manager.look_now()
    while loads(server, "loaded") < 3:
        await asyncio.sleep(0.01)
    assert await version_of(server) == "tiny@2 b"
    labels = {"model": "tiny", "version": "2"}
    assert server.sample("encserve_model_default", **labels) == 1
    assert server.sample("encserve_tokens_total", **labels) == len(ONE)
    gate.set()
    while await version_of(server) != "tiny@2 bb":
        await asyncio.sleep(0.01)


async def test_stuck_engines_are_given_up_together(
    repository: Repository, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orchestrators give a server so long to stop; it must not depend on how many models it has."""
    monkeypatch.setattr("encserve_server.repository.manager._CLOSE_SECONDS", 1.0)
    names = "abcdefgh"  # one after the other they would take eight seconds
    for name in names:
        repository.put("1", name, name=name)
    server = await serve(grace_seconds=0.0)
    calls = []
    for name, engine in zip(names, repository.engines, strict=True):
        engine.hold()
        calls.append(asyncio.create_task(version_of(server, model=name)))
        await asyncio.to_thread(engine.started.acquire)
    async with asyncio.timeout(7):
        assert not await server.app.stop()
    for engine in repository.engines:
        engine.let_go()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_an_inspection_of_a_version_whose_folder_is_gone(repository: Repository, serve: Serve) -> None:
    """Its second graph was never loaded, and cannot be now: no bug, so no INTERNAL."""

    def load(directory: Path, settings: Settings, tokenize_pool: TurnPool, served: str) -> LoadedModel:
        def load_inspector() -> FakeInspector:
            raise BundleError(f"{directory}: cannot be read")

        return dataclasses.replace(
            repository.load(directory, settings, tokenize_pool, served), load_inspector=load_inspector
        )

    repository.put("1", "a")
    server = await serve(load=load)
    with pytest.raises(Failed, match="cannot be inspected: its graph for it cannot be loaded") as caught:
        await server.inspect(pb.InspectRequest(input=pb.Input(token_ids=pb.TokenIds(ids=ONE))))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INSPECT_UNAVAILABLE")
