"""Typical mistakes of users of `encserve serve`, each with the line that the user then sees.

A line names the argument that the user gave, and says what to do.
"""

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkpoints import DATA
from fake_hub import Hub, hub_variables, open_hub
from fake_server import write_tokenizer
from serve_command import Serve, encserve_serve

pytestmark = pytest.mark.system

FILE_BYTES = 20_000


@dataclass(frozen=True, slots=True)
class Mistake:
    """An argument MODEL and the error of the command.

    Attributes:
        argument: The argument. `{folder}` is the folder of the checkpoints.
        error: The text after "Error: " or "cannot start: ". `{folder}` is the folder of the checkpoints.
        before: A function that changes the hub before the command runs.
        has_full_disk: Whether the test simulates a full disk: no file can be larger than 20 kB.
        variables: Additional environment variables of the command.
    """

    argument: str
    error: str
    before: Callable[[Hub], None] = lambda _: None
    has_full_disk: bool = False
    variables: dict[str, str] = field(default_factory=dict)


def make_gated(hub: Hub) -> None:
    hub.is_gated = True


def make_private(hub: Hub) -> None:
    hub.token = "right"


MISTAKES = {
    "a decoder without pooling": Mistake(
        "{folder}/decoder",
        "{folder}/decoder: is a decoder, and its files do not name the pooling. Give --pooling with the pooling that "
        "the model was trained with; for most decoders this is last_token",
    ),
    "a cross-encoder without its head": Mistake(
        "{folder}/cross-encoder",
        "weights of the head are missing: classifier.weight, classifier.bias. Download or save the model again, or "
        "give --ignore-head for the encoder alone",
    ),
    "no space": Mistake("{folder}/small", "Free some space, or choose a folder on another disk", has_full_disk=True),
    "a gated model": Mistake(
        "owner/small",
        "owner/small is gated: request access on its page, then log in (hf auth login), or set HF_TOKEN",
        before=make_gated,
    ),
    "a wrong token": Mistake(
        "owner/small",
        "owner/small: the hub refuses your token. Set HF_TOKEN to a valid token, or log in again (hf auth login)",
        before=make_private,
        variables={"HF_TOKEN": "wrong"},
    ),
    "a private model": Mistake(
        "owner/small",
        "no directory owner/small, and no such model on the hub that you can read; a private model needs hf auth "
        "login, or HF_TOKEN",
        before=make_private,
    ),
}


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small encoder, a cross-encoder without its head, and a decoder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, architecture in (
        ("small", "BertModel"),
        ("cross-encoder", "BertForSequenceClassification"),
        ("decoder", "GPT2ForCausalLM"),
    ):
        shutil.copytree(DATA / "hf-bert", folder / name)
        write_tokenizer(folder / name / "tokenizer.json")
        config = folder / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [architecture]}))
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_line_that_says_what_to_do(name: str, checkpoints: Path, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    values = {"folder": str(checkpoints)}
    with open_hub("owner/small") as hub:
        hub.commit(checkpoints / "small", "main")
        mistake.before(hub)
        variables = {
            **hub_variables(hub.endpoint, tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            **mistake.variables,
        }
        limit = limit_files if mistake.has_full_disk else None
        argument = mistake.argument.format_map(values)
        with encserve_serve(argument, variables=variables, cwd=tmp_path, limit=limit) as it:
            assert error_of(it).endswith(mistake.error.format_map(values))
    bundles = tmp_path / "cache" / "encserve" / "bundles"
    assert not bundles.exists() or list(bundles.iterdir()) == []


def error_of(serve: Serve) -> str:
    """Return the error, and check that standard output is empty."""
    error = serve.error()
    assert serve.out == []
    return error
