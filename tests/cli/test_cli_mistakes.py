"""Typical mistakes of users of `encserve` and of the Python client, each with the line that the user then sees.

A line names the option or the argument that the user gave, has the numbers, and says what to do. There is no traceback,
and no internal name of the client or of the gRPC messages.
"""

import asyncio
import shlex
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from command import encserve, inputs
from fake_encoder import FakeEncoder, Refused
from fake_server import FakeServer, start_fake_server
from ports import free_port

import encserve_client
from encserve_cli.commands import cli
from encserve_client import EncoderClient, EncserveError, rank

KEY = "right-" + 16 * "k"
LONG = " ".join(["hello"] * 40)
SET_TARGET = "set the target (target=, --target or ENCSERVE_TARGET)"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command and the error that the command prints. The test replaces `{name}` by a value.

    Attributes:
        command: The words after `encserve`. The variable ENCSERVE_TARGET has the server's address.
        error: The text after "Error: ". If the status is 2, the command also prints its usage.
        server: "plain", or "keys" for a server that wants a key.
        status: The exit status: 1, or 2 for an error in the command line itself.
    """

    command: str
    error: str
    server: str = "plain"
    status: int = 1


COMMANDS = [
    # Mistakes about the server.
    Mistake(
        "embed hello --target {nobody}",
        "{nobody}: no encserve server here: connection refused. Start one, or " + SET_TARGET,
    ),
    Mistake(
        "models --target {metrics}",
        "{metrics}: an HTTP server answers here, not a gRPC server: "
        + SET_TARGET
        + " to the server's gRPC port, 50051 by default",
    ),
    Mistake(
        "models --target https://encoder",
        "--target must be host:port, without https://; was 'https://encoder'. Give the host with the server's gRPC "
        "port (50051 by default), and turn on TLS (tls=True or --tls)",
    ),
    Mistake(
        "models --target encoder:grpc",
        "--target must be host:port, such as 'localhost:50051' or '[fd00::7]:50051', with a port from 1 to 65535; was "
        "'encoder:grpc'",
    ),
    Mistake("models --timeout 0", "--timeout must be > 0; was 0.0"),
    Mistake("models --ca nowhere.pem", "--ca cannot be read: nowhere.pem: No such file or directory"),
    Mistake(
        "models --target ipv4:10.0.0.1,10.0.0.2 --tls",
        "--server-name must be set to the name that all certificates have, because the target has several addresses",
    ),
    Mistake("models --cert client.pem", "--cert needs --tls-key; give both or none", status=2),
    Mistake(
        "models --api-key wrong",
        "unknown or revoked key; this client takes the key from api_key=, --api-key or ENCSERVE_API_KEY",
        "keys",
    ),
    Mistake(
        "models",
        "no key: send it as `authorization: Bearer KEY`, `api-key` or `x-api-key`; this "
        "client takes the key from api_key=, --api-key or ENCSERVE_API_KEY",
        "keys",
    ),
    Mistake(
        "models --api-key 'a key'",
        "--api-key must be only the key, in printable ASCII without spaces; character 2 of 5 is not. encserve-server "
        "hash-key makes valid keys",
    ),
    Mistake("models --metadata team", "--metadata must be NAME=VALUE; was 'team'", status=2),
    # Mistakes about the model and its options.
    Mistake("embed hello --model nope", "--model: no model 'nope'; the models are tiny"),
    Mistake("embed hello --model-version 9", "--model-version: no version '9' of tiny; the versions are 2, 1"),
    Mistake("embed hello --kind sparse", "--kind 'sparse': model tiny has the kinds 'vector'"),
    Mistake(
        "embed hello --kind sparse --pooling mean",
        "--pooling does not apply to --kind sparse; leave out --pooling",
        status=2,
    ),
    Mistake("embed hello --task query", "--task 'query': model tiny has no tasks"),
    Mistake("tokenize hello --task query", "--task 'query': model tiny has no tasks"),
    Mistake("embed hello --prompt-name nope", "--prompt-name 'nope': model tiny has the prompts 'q'"),
    Mistake(
        "encode hello --dtype int8",
        "Invalid value for '--dtype': 'int8' is not one of 'float32', 'float16'.",
        status=2,
    ),
    Mistake("embed hello --dimensions 9", "--dimensions must be at most 4, the width of model tiny; was 9"),
    Mistake(
        "embed hello --dimensions -1",
        "Invalid value for '--dimensions': -1 is not in the range x>=1.",
        status=2,
    ),
    Mistake("inspect hello --layers 9", "--layers must be from 0 to 2; was 9"),
    # Mistakes about the inputs.
    Mistake("embed", "no input; give a TEXT, or a file with --input FILE", status=2),
    Mistake(
        "embed t.txt",
        "'t.txt' looks like a file: read it with --input t.txt, or send the text itself with --text",
        status=2,
    ),
    Mistake("embed --input missing.txt", "missing.txt: there is no such file; check the path"),
    Mistake(
        "embed --input parts/*.txt",
        "--input parts/*.txt: no file matches this pattern; check the folder and the pattern",
        status=2,
    ),
    Mistake("embed --input empty.txt", "no input was found in empty.txt; give a file with at least one line or row"),
    Mistake(
        "embed --input rows.jsonl",
        "rows.jsonl, line 1: has no column 'text'; the columns are 'title', 'body': choose one with --column",
    ),
    Mistake(
        "embed --input broken.parquet",
        "broken.parquet: cannot be read as Parquet: Parquet magic bytes not found in footer. Either the file is "
        "corrupted or this is not a parquet file.",
    ),
    Mistake(
        "embed --input long.txt --output v.npy",
        "long.txt, line 2: must be at most 32 tokens (max_sequence_tokens of tiny); was 44. Set truncate, or split "
        "the input (--truncate)",
    ),
    Mistake("embed hello --ids", "argument 1: --ids needs whole numbers, such as 101,2023,102; was 'hello'"),
    Mistake("similarity hello", "similarity needs at least 2 texts; was 1"),
    # Mistakes about the outputs.
    Mistake(
        "embed hello --output nowhere/v.npy",
        "--output nowhere/v.npy: cannot write into the folder nowhere: No such file or directory. Make this folder, or "
        "name another",
    ),
    Mistake(
        "embed hello --output v.pt",
        "--output v.pt: must end in .npy, .npz, .jsonl, .csv, .parquet; was .pt. End the name of a folder with /",
    ),
    Mistake(
        "encode hello --output v.npy",
        "--output: a .npy file holds one vector for each input, but 'tokens' has several rows: use .npz, .jsonl "
        "or .parquet",
    ),
    Mistake("embed hello --output job/", "a job reads files; give --input FILE instead of TEXT", status=2),
    Mistake(
        "embed --input t.txt --output job/ --shard 3/2",
        "Invalid value for '--shard': must be I/N with I from 0 to N-1, for example 0/8; was 3/2",
        status=2,
    ),
    Mistake(
        "embed hello --overwrite",
        "--overwrite is for jobs: give --output a folder that exists, or a name that ends in /",
        status=2,
    ),
    Mistake(
        "bench --concurrency 0",
        "Invalid value for '--concurrency': 0 is not in the range 1<=x<=4096.",
        status=2,
    ),
]

# Each entry is a line of Python, and the text of the exception that the line raises.
CALLS = [
    ("client.embed(None)", "inputs must be a list of inputs; was NoneType"),
    ("client.embed(b'hello')", "inputs must be a str or a list of inputs; was bytes: decode the bytes"),
    (
        "client.embed(['hello', None])",
        "inputs[1] must be a text, a list, tuple or array of token ids, or an array of vectors; was NoneType",
    ),
    ("client.embed([1, 2])", "inputs[0] is a single id; for one sequence of ids pass [ids]"),
    ("client.embed(np.array([1, 2]))", "inputs[0] is a single id; for one sequence of ids pass [ids]"),
    ("client.embed([[1, 5000]])", "inputs[0][1]: must be from 0 to 999 (the vocabulary of tiny); was 5000"),
    (
        "client.embed(['hello', LONG])",
        "inputs[1]: must be at most 32 tokens (max_sequence_tokens of tiny); was 44. Set truncate, or split the input",
    ),
    ("client.embed('hello', kind='dense')", "kind must be one of 'vector', 'multi_vector', 'sparse'; was 'dense'"),
    ("client.embed('hello', dimensions=-1)", "dimensions must be >= 1; was -1"),
    (
        "client.embed('hello', max_active_dims=3)",
        "max_active_dims must be left out, because it is only for the kind 'sparse'",
    ),
    ("client.embed('hello', model='nope')", "model: no model 'nope'; the models are tiny"),
    ("client.run('hello', outputs='mean')", "outputs must be a list; for one output pass ['mean']"),
    (
        "client.token_vectors('hello', dtype='int8')",
        "dtype 'int8': 'tokens' has the types 'float32', 'float16'",
    ),
    (
        "client.embed_spans('hello', [(0, 9)])",
        "spans.ends[0]: must be at most 5, the number of code points in the text; was 9",
    ),
    (
        "rank(np.zeros(4), np.zeros((2, 8)))",
        "a row of documents must have 4 numbers, as query has; had 8. Embed both with one model",
    ),
]


Start = Callable[[str], Awaitable[FakeServer]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Yield a function that starts a server; `Mistake.server` lists the kinds. Change to a folder with input files."""
    servers: list[FakeServer] = []
    settings: dict[str, dict[str, Any]] = {"plain": {}, "keys": {"api_key": KEY}}

    async def start(kind: str) -> FakeServer:
        (tmp_path / "server").mkdir()
        servers.append(await start_fake_server(tmp_path / "server", prompts={"q": "query: "}, **settings[kind]))
        return servers[0]

    here = tmp_path / "here"
    here.mkdir()
    for name, text in (
        ("t.txt", "hello\n"),
        ("empty.txt", ""),
        ("long.txt", f"hello\n{LONG}\n"),
        ("rows.jsonl", '{"title": "hello", "body": "world"}\n'),
        ("broken.parquet", "not parquet"),
    ):
        (here / name).write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.delenv("ENCSERVE_API_KEY", raising=False)
    monkeypatch.setattr("encserve_client._logic.failures._FIRST_CONTACT_SECONDS", 0.0)  # no retries
    monkeypatch.setattr("encserve_server.app._REFUSING_SECONDS", 0.0)
    yield start
    for server in servers:
        await server.stop()


async def run(command: str, target: str) -> Result:
    """Run `encserve` against a server."""
    return await asyncio.to_thread(CliRunner().invoke, cli, shlex.split(command), env={"ENCSERVE_TARGET": target})


@pytest.mark.parametrize("mistake", COMMANDS, ids=lambda mistake: f"{mistake.command} ({mistake.server})")
async def test_a_command(mistake: Mistake, start: Start) -> None:
    app = (await start(mistake.server)).app
    target = f"localhost:{app.grpc_port}"
    values = {
        "metrics": f"localhost:{app.metrics_port}",
        "nobody": f"127.0.0.1:{free_port()}",
    }
    result = await run(mistake.command.format(**values), target)
    assert (result.exit_code, result.stdout) == (mistake.status, ""), result.output
    *usage, error = result.stderr.splitlines()
    assert error == f"Error: {mistake.error.format(**values)}"
    assert [line.partition(" ")[0] for line in usage] == (["Usage:", "Try", ""] if mistake.status == 2 else [])


@pytest.mark.parametrize(("line", "error"), CALLS)
async def test_a_call_in_python(line: str, error: str, start: Start) -> None:
    """The text is exact, and the traceback has at most 6 frames of the library."""
    app = (await start("plain")).app
    names = {"LONG": LONG, "np": np, "rank": rank}
    with EncoderClient(f"localhost:{app.grpc_port}") as client, pytest.raises(EncserveError) as raised:
        await asyncio.to_thread(eval, line, names | {"client": client})
    assert str(raised.value) == error
    assert str(raised.value).startswith(raised.value.field)
    library = Path(encserve_client.__file__).parent
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert sum(Path(frame.filename).is_relative_to(library) for frame in frames) <= 6


# Tests of advice about options.

# The arguments of each command that reads texts. The test replaces TEXT by a text, and FILE by the flags of a file.
READERS = {
    "embed": ["TEXT"],
    "encode": ["TEXT"],
    "inspect": ["TEXT"],
    "rank": ["query", "TEXT"],
    "score": ["FILE", "--output", "OUTPUT/"],
    "similarity": ["TEXT", "TEXT"],
    "tokenize": ["TEXT"],
}


def test_the_commands_that_read_texts() -> None:
    found = {name for name, it in cli.commands.items() if any("--input" in option.opts for option in it.params)}
    assert found == READERS.keys()


def too_long(_: object) -> Any:
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "inputs[0]: is too long", "SEQUENCE_TOO_LONG")


@pytest.mark.parametrize("name", [it for it in READERS if it != "tokenize"])  # tokenize accepts every length
async def test_a_command_advises_truncate_only_if_it_has_this_option(
    service: FakeEncoder, tmp_path: Path, name: str
) -> None:
    service.refused_texts = ("a", LONG * 2)  # a job of scores first sends the text "a"
    service.inspect = too_long
    (tmp_path / "pairs.csv").write_text("query,document\na,b\n")
    replaced = {"TEXT": [LONG * 2], "FILE": inputs(tmp_path / "pairs.csv"), "OUTPUT/": [f"{tmp_path / 'scores'}/"]}
    arguments = [it for argument in READERS[name] for it in replaced.get(argument, [argument])]
    result = await encserve(service, name, *arguments, status=1)
    has_option = any("--truncate" in it.opts for it in cli.commands[name].params)
    assert ("(--truncate)" in result.stderr) == has_option, result.stderr


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", READERS)
async def test_a_command_advises_ids_only_if_it_has_this_option(
    service: FakeEncoder, tmp_path: Path, name: str, suffix: str
) -> None:
    file = tmp_path / f"ids{suffix}"
    if suffix == ".jsonl":
        file.write_text('{"text": [1, 2], "query": [1], "document": [2]}\n')
    else:
        pyarrow.parquet.write_table(pyarrow.table({it: [[1, 2]] for it in ("text", "query", "document")}), file)
    query = ["query"] if name == "rank" else []
    output = ["--output", f"{tmp_path / 'scores'}/"] if name == "score" else []
    status = 3 if (name, suffix) == ("score", ".jsonl") else 1
    result = await encserve(service, name, *query, *inputs(file), *output, status=status)
    has_option = any("--ids" in it.opts for it in cli.commands[name].params)
    assert ("give --ids" in result.output) == has_option, result.output
