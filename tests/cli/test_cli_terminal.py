"""Tests of the command in a terminal: progress, a server that goes away, and Ctrl-C."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_encoder import FakeEncoder, stalled_inspection
from terminal import terminal
from waiting import until

from encserve_proto.v1 import encoder_pb2 as pb

pytestmark = pytest.mark.system

TEXTS = 3000
OUTPUTS = {"a file": "v.npy", "a job": "vectors/"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of 3,000 texts, which become more than ten messages."""
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"text {i}\n" for i in range(TEXTS)))
    return path


def arguments(service: FakeEncoder, source: Path, output: str) -> tuple[object, ...]:
    return ("embed", "--target", service.target, "--input", source, "--output", output)


def hold_from(service: FakeEncoder, first: int) -> asyncio.Event:
    """Return an event. Until the event is set, the server delays messages with text number `first` or a later text."""
    go_on = asyncio.Event()

    async def wait(request: pb.EncodeRequest) -> None:
        if max(int(it.text.removeprefix("text ")) for it in request.inputs) >= first:
            await go_on.wait()

    service.before = wait
    return go_on


@pytest.mark.parametrize(("output", "columns"), [("v.npy", 80), ("vectors/", 140)], ids=OUTPUTS)
async def test_progress_moves_with_the_first_reply(
    service: FakeEncoder, source: Path, output: str, columns: int
) -> None:
    """The server answers the first messages only. The bar shows the texts, the rate and the time left."""
    go_on = hold_from(service, 1000)
    with terminal(*arguments(service, source, output), columns=columns, cwd=source.parent) as it:
        facts = re.compile(r" ([1-9]\d*) of 3,000 texts, [\d.,]+ texts/s, \d+:\d\d:\d\d left$")
        await until(lambda: any(facts.search(line) for line in it.lines))
        go_on.set()
        assert await asyncio.to_thread(it.wait) == 0
        assert {len(line) for line in it.lines if "texts/s" in line} == {columns - 3}  # room for ^C
        assert not it.hides_cursor


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
async def test_a_server_that_goes_away_is_named_with_the_time_left(
    service: FakeEncoder, source: Path, output: str
) -> None:
    """The server stops after some messages, and restarts. The command prints a line for each of the two events."""
    hold_from(service, 2048)
    with terminal(*arguments(service, source, output), cwd=source.parent) as it:
        await until(lambda: service.n_open)
        await service.server.stop(None)
        away = re.compile(rf"server {service.target} is away: trying again for [1-9]\d* s")
        await until(lambda: any(away.fullmatch(line) for line in it.lines))
        service.before = None
        await service.start(int(service.target.rpartition(":")[2]))
        assert await asyncio.to_thread(it.wait) == 0
        assert it.lines.count(f"server {service.target} is back") == 1
        assert len([line for line in it.lines if away.fullmatch(line)]) == 1


@pytest.mark.parametrize("is_away", [False, True], ids=["a server that does not answer", "a server that is away"])
@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("v.npy", "stopped"),
        ("vectors/", "stopped: 2,048 of 3,000 rows, 1 parts, are in {}/vectors; the same command goes on from there"),
    ],
    ids=OUTPUTS,
)
async def test_ctrl_c_ends_the_command_with_one_line(
    service: FakeEncoder, source: Path, output: str, said: str, is_away: bool
) -> None:
    hold_from(service, 2048)
    with terminal(*arguments(service, source, output), columns=140, cwd=source.parent) as it:
        await until(lambda: service.n_open and (output == "v.npy" or [*source.parent.glob("vectors/part*")]))
        if is_away:
            await service.server.stop(None)
            await until(lambda: any("is away" in line for line in it.lines))
        it.press_ctrl_c()
        assert await asyncio.to_thread(it.wait) == 130
        assert it.lines[-1] == said.format(source.parent)
        assert len([line for line in it.lines if "stop" in line]) == 1
        assert not it.hides_cursor
    assert not (source.parent / "v.npy").exists()


async def test_ctrl_c_ends_an_inspection(service: FakeEncoder, tmp_path: Path) -> None:
    service.inspect = stalled_inspection
    with terminal("inspect", "--target", service.target, "a text", cwd=tmp_path) as it:
        await until(lambda: service.n_open_inspections)
        it.press_ctrl_c()
        assert await asyncio.to_thread(it.wait) == 130
        assert it.lines[-1] == "stopped"


async def test_lines_on_a_terminal_have_no_bar(service: FakeEncoder, source: Path) -> None:
    with terminal(*arguments(service, source, "-"), cwd=source.parent) as it:
        assert await asyncio.to_thread(it.wait) == 0
        assert not any("texts/s" in line for line in it.lines)


@pytest.mark.parametrize(
    "words",
    [
        ["embed", "--help"],
        ["models"],
        ["encode", "two words"],
        ["encode", "two words", "--json"],
        ["tokenize", "two words"],
        ["inspect", "two words"],
        ["embed", "--input", "texts.txt", "--output", "-"],
        ["embed", "--input", "texts.txt", "--output", "vectors/", "--json"],
    ],
    ids=" ".join,
)
async def test_a_reader_that_ends_first_gets_no_error_message(
    service: FakeEncoder, source: Path, words: list[str]
) -> None:
    """In `encserve … | head -1`, `head` ends first. The command then ends without a message."""
    reader, writer = os.pipe()
    os.close(reader)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "encserve_cli", words[0], "--target", service.target, *words[1:]),
        cwd=source.parent,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    _, errors = await asyncio.wait_for(process.communicate(), 50)
    assert (process.returncode, errors) == (1, b"")
