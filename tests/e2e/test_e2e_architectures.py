"""Every architecture: transformers makes a small model, `encserve-export hf` exports it, one server serves them all."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import least_cosine, worst_relative_error
from architectures import ARCHITECTURES, VOCAB_SIZE, Architecture, build, rows_of, save
from click.testing import CliRunner
from google.protobuf import json_format
from real_server import RealServer, cpu_has_bfloat16, real_server

from encserve_client import EncoderClient
from encserve_export.cli import main
from encserve_proto.bundle.v1 import manifest_pb2

DOCS = Path(__file__).parent.parent.parent / "docs" / "models.md"
LENGTHS = (1, 60, 3, 9, 60, 2, 17)
OUR_OWN = [its for its in ARCHITECTURES if its.name in ("ModernBERT", "NomicBERT", "GTE")]
OURS = pytest.mark.parametrize("architecture", OUR_OWN, ids=lambda its: its.folder)
EACH = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda its: its.folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of all of them, and of our own encoder's where it is not what is taken."""
    directories, repository = tmp_path_factory.mktemp("directories"), tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        directory = save(architecture, directories)
        command = ["hf", directory, "--model-repository", repository, "--max-sequence-tokens", 60, "--ids-only"]
        own = [["--via", "own", "--name", own_name(architecture)]] if architecture in OUR_OWN else []
        for more in ([], *own):
            result = CliRunner().invoke(main, [str(argument) for argument in (*command, *more)])
            assert result.exit_code == 0, f"{architecture.name}: {result.output}"
    return repository


def own_name(architecture: Architecture) -> str:
    return f"{architecture.folder}-own"


@pytest.fixture(scope="module")
def server_of_all(served: Path) -> Iterator[RealServer]:
    with real_server(served) as server:
        yield server


@pytest.fixture(scope="module")
def client_of_all(server_of_all: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(server_of_all.target) as client:
        yield client


@EACH
def test_rows_alone_and_among_others(client_of_all: EncoderClient, architecture: Architecture) -> None:
    model, random = build(architecture), np.random.default_rng(0)
    sequences = [random.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    for name in (architecture.folder, *([own_name(architecture)] if architecture in OUR_OWN else [])):
        together = client_of_all.encode(sequences, model=name)
        for got, ids in zip(together, sequences, strict=True):
            want = rows_of(model, ids)
            assert worst_relative_error(got, want) <= 5e-5
            (alone,) = client_of_all.encode([ids], model=name)
            assert worst_relative_error(alone, want) <= 5e-5


@OURS
def test_attention_and_states_are_transformers_own(client_of_all: EncoderClient, architecture: Architecture) -> None:
    """What inspect shows, with relative positions, rotary ones, and windows."""
    ids = np.random.default_rng(0).integers(3, VOCAB_SIZE, 50).tolist()
    result = client_of_all.inspect(ids, model=own_name(architecture))
    with torch.inference_mode():
        want = build(architecture)(torch.tensor([ids]), output_attentions=True, output_hidden_states=True)
    assert result.attention is not None
    assert result.hidden_states is not None
    for got, weights in zip(result.attention, want.attentions, strict=True):
        assert np.abs(got - weights[0].numpy()).max() <= 1e-5
    for got, states in zip(result.hidden_states, want.hidden_states, strict=True):
        assert worst_relative_error(got, states[0].numpy()) <= 5e-5


@pytest.mark.parametrize("flags", [[], ["--precision", "bfloat16"]], ids=["float32", "bfloat16"])
def test_rows_of_openvino(served: Path, flags: list[str]) -> None:
    if flags and not cpu_has_bfloat16():
        pytest.skip("THIS CPU HAS NO BFLOAT16")
    models = [flag for its in OUR_OWN for flag in ("--model", own_name(its))]
    with real_server(served, "--engine", "openvino", *models, *flags) as server, EncoderClient(server.target) as client:
        for architecture in OUR_OWN:
            model, random = build(architecture), np.random.default_rng(0)
            sequences = [random.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
            for got, ids in zip(client.encode(sequences, model=own_name(architecture)), sequences, strict=True):
                want = rows_of(model, ids)
                if flags:
                    assert least_cosine([got], [want]) >= 0.999, architecture.name
                else:
                    assert worst_relative_error(got, want) <= 5e-5, architecture.name


def test_the_table_of_the_docs(served: Path) -> None:
    """docs/models.md says which route each takes."""
    lines = ["| architecture | `model_type` | route |", "|---|---|---|"]
    for architecture in ARCHITECTURES:
        text = (served / architecture.folder / "1" / "manifest.json").read_text()
        route = json_format.Parse(text, manifest_pb2.Manifest()).source.route
        lines.append(f"| {architecture.name} | `{architecture.model_type}` | {route} |")
    table = "\n".join(lines)
    assert table in DOCS.read_text(), f"the table must be:\n{table}"
