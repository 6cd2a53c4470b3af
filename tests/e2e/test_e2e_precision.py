"""Bundles in float16 and int8, exported, served and asked: their rows point where PyTorch's do."""

from collections.abc import Iterator

import numpy as np
import pytest
from agreement import least_cosine
from checkpoints import DATA, MODEL, export_minilm, golden_cases
from exporting import export_once
from real_server import RealServer, real_server

from encserve_client import EncoderClient
from encserve_export import Target, export_hf
from encserve_export.ground.precision import Precision

LEAST: dict[Precision, float] = {"float16": 0.9999, "int8": 0.99}
ROUNDED = ("float16", "int8")
ALONE = 0.999
LENGTHS = (1, 2, 5, 9, 17, 33, 64, 128, 150, 200, 256)


@pytest.fixture(scope="module")
def rounded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The real model and a small one, in each of the two."""
    repository = tmp_path_factory.mktemp("rounded")
    for precision in LEAST:
        export_minilm(repository, f"{MODEL}-{precision}", precision)
        small = Target(model_repository=repository, name=f"hf-bert-{precision}")
        export_once(export_hf, DATA / "hf-bert", target=small, precision=precision, ids_only=True)
    with real_server(repository) as server:
        yield server


@pytest.fixture(scope="module")
def rounded(rounded_server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(rounded_server.target) as client:
        yield client


@pytest.mark.parametrize("precision", ROUNDED)
def test_real_text_alone_and_in_batches(
    rounded: EncoderClient, client: EncoderClient, real_ids: list[int], precision: Precision
) -> None:
    sequences = [[101, *real_ids[11 * i : 11 * i + length - 2], 102][:length] for i, length in enumerate(LENGTHS)]
    model = f"{MODEL}-{precision}"
    together = rounded.encode(sequences, model=model)
    assert least_cosine(together, client.encode(sequences)) >= LEAST[precision]
    alone = [rounded.encode([ids], model=model)[0] for ids in sequences]
    assert least_cosine(together, alone) >= ALONE


@pytest.mark.parametrize("precision", ROUNDED)
def test_golden_cases(rounded: EncoderClient, precision: Precision) -> None:
    ids, want = golden_cases("hf-bert")
    assert least_cosine(rounded.encode(ids, model=f"hf-bert-{precision}"), want) >= LEAST[precision]


@pytest.mark.parametrize("precision", ROUNDED)
def test_what_is_said_of_them(rounded: EncoderClient, rounded_server: RealServer, precision: Precision) -> None:
    assert rounded.model(f"{MODEL}-{precision}").precision == precision
    warned = {line["model"] for line in rounded_server.log if "a float16 bundle is for GPUs" in line["message"]}
    assert warned == {f"{MODEL}-float16", "hf-bert-float16"}


@pytest.mark.parametrize("precision", ROUNDED)
def test_inspections(rounded: EncoderClient, client: EncoderClient, precision: Precision) -> None:
    """What goes on inside belongs to the rows that are served."""
    text, model = "I understand this", f"{MODEL}-{precision}"
    inspected, want = rounded.inspect(text, model=model), client.inspect(text)
    assert inspected.attention is not None
    assert inspected.hidden_states is not None
    assert want.hidden_states is not None
    assert np.abs(inspected.attention.sum(axis=-1) - 1).max() <= 2e-3
    assert least_cosine(list(inspected.hidden_states), list(want.hidden_states)) >= LEAST[precision]
    assert least_cosine([inspected.hidden_states[-1]], [rounded.encode([text], model=model)[0]]) >= ALONE
