"""Models that come and go while a server serves: a real server, fake engines, bundles that are one line of text."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_server import D_MODEL, SERVICE, Failed, FakeServer, StartServer, fake_model
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.app import App
from encserve_server.engine.fake import FakeEngine, FakeInspector
from encserve_server.errors import BundleError, DeviceError
from encserve_server.loading import LoadedModel
from encserve_server.settings import Settings

BAD, CRASHES, NO_DEVICE = "bad", "crashes", "no device"
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

    def load(self, directory: Path, settings: Settings, tokenize_pool: Executor) -> LoadedModel:
        """A loader for the server."""
        content = (directory / "manifest.json").read_text()
        self.loads.append(f"{directory.parent.name}@{directory.name}: {content}")
        self.budgets.append(settings.max_batch_tokens if settings.tune_batches else 0)
        if content == BAD:
            raise BundleError(f"{directory}: altered")
        if content == CRASHES:
            raise ZeroDivisionError("a bug")
        if content == NO_DEVICE:
            raise DeviceError("--device cuda: none")
        self.engines.append(FakeEngine(D_MODEL))
        inspector = FakeInspector(D_MODEL, 2, 32)
        return fake_model(
            directory,
            tokenize_pool,
            self.engines[-1],
            fingerprint=content.rjust(32, "0"),
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
        return await start_server(load=repository.load, **chosen)

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
    async with asyncio.timeout(10):
        await done.wait()
    manager._look = looking


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
    repository.put("2", "mended")
    await look(server)
    assert await version_of(server) == "tiny@2 mended"


async def test_a_refused_version_is_tried_again_when_asked_to(repository: Repository, serve: Serve) -> None:
    """The bundle may be good, and the device have been full."""
    repository.put("1", "a")
    server = await serve()
    repository.put("2", BAD)
    for _ in range(3):
        await look(server)
    assert loads(server, "refused") == 3


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
    """The new content serves under the old name, the old engine is closed, and counts begin anew."""
    repository.put("1", "a")
    server = await serve()
    assert await version_of(server) == "tiny@1 a"
    repository.put("1", "b")
    await look(server)
    assert await version_of(server) == "tiny@1 b"
    assert [engine.closed for engine in repository.engines] == [True, False]
    assert server.sample("encserve_tokens_total", model="tiny", version="1") == len(ONE)
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
    async with asyncio.timeout(5):
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
