"""A server with all tiny test models returns the same vectors as the library of each model.

`zoo` and `architectures` in tests/support list the models. The tests call the server over gRPC and HTTP.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
from agreement import least_cosine, worst_relative_error
from architectures import ARCHITECTURES, VOCAB_SIZE, Architecture, build, rows_of, save
from checkpoints import MODEL
from click.testing import CliRunner
from exporting import export_once
from real_server import RealServer, cpu_has_bfloat16, real_server
from sentence_models import text_of
from zoo import LATE, MODELS, SPARSE, SPARSE_TEXTS, TEXTS, Way, Zoo, assert_same, served

from encserve_cli.commands import cli
from encserve_client import EncoderClient, InvalidRequestError, Output, maxsim
from encserve_client.options import TrainedKind
from encserve_export import Target, export_hf

Array = npt.NDArray[Any]
LENGTHS = (1, 60, 3, 9, 60, 2, 17)
# The models for OpenVINO. One model of each kind is enough, because only the engine differs.
ON_OPENVINO = ["all-of-it", "gemma", "modernbert", "sum-log1p", "ModernBERT", "GTE"]


@pytest.fixture(scope="module")
def models(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository with the models of `zoo` and of `architectures`."""
    repository, directories = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("directories")
    for name in (*MODELS, "bge-m3"):
        zoo.export(name, repository)
    for architecture in ARCHITECTURES:
        target = Target(model_repository=repository, name=architecture.folder)
        directory = save(architecture, directories)
        export_once(export_hf, directory, target=target, max_sequence_tokens=60, ids_only=True)
    return repository


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RealServer]:
    with real_server(models, "--http-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def on_openvino(models: Path) -> Iterator[EncoderClient]:
    flags = [flag for name in ON_OPENVINO for flag in ("--model", name)]
    with real_server(models, "--engine", "openvino", *flags) as server, EncoderClient(server.target) as client:
        yield client


def compare_with_the_library(zoo: Zoo, client: EncoderClient, name: str) -> None:
    row = MODELS[name]
    for way in row.ways:
        want = zoo.vectors(name, way)
        assert_same(row.kind, served(client, name, way, row.texts), want, way)
    for text, vectors in zip(row.texts[:4], want[:4], strict=True):
        assert_same(row.kind, served(client, name, way, [text]), [vectors], f"{way}, alone")


def compare_with_transformers(client: EncoderClient, architecture: Architecture) -> None:
    model, random = build(architecture), np.random.default_rng(0)
    sequences = [random.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    together = client.token_vectors(sequences, model=architecture.folder)
    for got, ids in zip(together, sequences, strict=True):
        want = rows_of(model, ids)
        (alone,) = client.token_vectors([ids], model=architecture.folder)
        assert max(worst_relative_error(got, want), worst_relative_error(alone, want)) <= 5e-5


@pytest.mark.parametrize("name", MODELS)
def test_the_server_gives_the_vectors_of_the_library(zoo: Zoo, client: EncoderClient, name: str) -> None:
    compare_with_the_library(zoo, client, name)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda it: it.folder)
def test_the_server_gives_the_rows_of_transformers(client: EncoderClient, architecture: Architecture) -> None:
    compare_with_transformers(client, architecture)


@pytest.mark.parametrize("name", ON_OPENVINO)
def test_openvino_gives_the_vectors_of_the_library(zoo: Zoo, on_openvino: EncoderClient, name: str) -> None:
    if name in MODELS:
        compare_with_the_library(zoo, on_openvino, name)
    else:
        (architecture,) = [it for it in ARCHITECTURES if it.folder == name]
        compare_with_transformers(on_openvino, architecture)


def test_openvino_bfloat16_vectors_are_close_to_the_library(zoo: Zoo, models: Path) -> None:
    if not cpu_has_bfloat16():
        pytest.skip("THIS CPU HAS NO BFLOAT16: vectors of the tiny models in --precision bfloat16 are not tested here")
    names = ["all-of-it", "ModernBERT", "GTE"]
    flags = [flag for name in names for flag in ("--model", name)]
    rounded = ("--engine", "openvino", "--precision", "bfloat16")
    with real_server(models, *rounded, *flags) as server, EncoderClient(server.target) as client:
        want = zoo.vectors("all-of-it", Way())
        assert least_cosine(served(client, "all-of-it", Way(), MODELS["all-of-it"].texts), want) >= 0.999
        for architecture in ARCHITECTURES:
            if architecture.folder in names:
                ids = np.random.default_rng(0).integers(3, VOCAB_SIZE, 60).tolist()
                got = client.token_vectors([ids], model=architecture.folder)
                assert least_cosine(got, [rows_of(build(architecture), ids)]) >= 0.999


@pytest.mark.parametrize("name", [*LATE, *SPARSE, MODEL])
def test_http_and_grpc_give_the_same_bits(server: RealServer, client: EncoderClient, name: str) -> None:
    row = MODELS[name]
    for way in row.ways:
        body: dict[str, Any]
        if row.kind == "sparse":
            body = {"inputs": row.texts, "model": name, "input_type": way.task}
            got = [_dense(it, client.model(name).vocab_size) for it in _post(server, "/embed_sparse", body)]
        elif row.kind == "dense":
            # The request has no field for a prompt, because the model has no prompts.
            body = {"inputs": row.texts, "model": name, "normalize": False}
            got = [np.array([it], np.float32) for it in _post(server, "/embed", body)]
        else:
            body = {"input": row.texts, "model": name, "task": "token_embed", "input_type": way.task}
            got = [_reshaped(it) for it in _post(server, "/pooling", body)["data"]]
        for vectors, want in zip(got, served(client, name, way, row.texts), strict=True):
            np.testing.assert_array_equal(vectors, want)


def _post(server: RealServer, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def _reshaped(answer: dict[str, Any]) -> Array:
    return np.array(answer["data"], np.float32).reshape(answer["shape"])


def _dense(weights: list[dict[str, Any]], width: int) -> Array:
    dense = np.zeros((1, width), np.float32)
    dense[0, [it["index"] for it in weights]] = [it["value"] for it in weights]
    return dense


@pytest.mark.parametrize("l2_normalize", [False, True])
@pytest.mark.parametrize("name", ["cut", "every-pooling", "prompt-left-out"])
def test_shortened_vectors_equal_the_library(zoo: Zoo, client: EncoderClient, name: str, l2_normalize: bool) -> None:
    """Shortened vectors equal the vectors of sentence-transformers, with and without l2_normalize.

    The server first normalizes a vector as the model says, then cuts it, and then normalizes it if l2_normalize is set.
    """
    want = zoo.library(name).encode(list(TEXTS), truncate_dim=5, normalize_embeddings=l2_normalize)
    output = Output("model", l2_normalize=l2_normalize, dimensions=5)
    result = client.run(TEXTS, outputs=[output], model=name, truncate=True).outputs[0]
    assert_same("dense", list(result.matrix()), list(want))
    assert result.l2_normalized == l2_normalize


@pytest.mark.parametrize("name", ["default-prompt", "cut", "all-of-it"])
def test_the_server_describes_the_model_as_the_library_does(zoo: Zoo, client: EncoderClient, name: str) -> None:
    info, library = client.model(name), zoo.library(name)
    assert info.prompts == library.prompts
    assert info.default_prompt_name == (library.default_prompt_name or "")
    assert (info.similarity or "cosine") == library.similarity_fn_name
    assert (info.default_dimensions or info.vector_width) == library.get_embedding_dimension()


def test_prompt_and_chat_template_tokens_have_no_offsets(client: EncoderClient) -> None:
    (info,) = client.run(["the cat"], model="lengths-of-tasks", prompt_name="instruction").sequences
    assert info.offsets is not None
    assert info.offsets.tolist() == [[0, 0]] * 5 + [[0, 3], [4, 7], [0, 0]]
    (info,) = client.run(["the cat"], model="messages", prompt_name="query").sequences
    assert info.offsets is not None
    assert info.special is not None
    assert info.offsets.tolist() == [[0, 0]] * 5 + [[0, 3], [4, 7]] + [[0, 0]] * 3
    assert info.special.tolist() == [True] * 5 + [False] * 2 + [True] * 3
    (rows,) = client.token_vectors(["the cat"], model="messages", exclude_special_tokens=True)
    assert len(rows) == 2


def test_token_ids_get_no_prompt(client: EncoderClient) -> None:
    ids = [2, 5, 6, 3]
    with_ids = client.embed([ids], model="default-prompt")
    without = client.embed(["the cat"], model="default-prompt", prompt_name="")
    assert_same("dense", list(with_ids), list(without))
    with pytest.raises(InvalidRequestError, match=r"prompt_name.*inputs\[1\]"):
        client.embed(["the cat", ids], model="default-prompt", prompt_name="query")
    with pytest.raises(InvalidRequestError, match="'summary'.*'instruction', 'nothing', 'passage'"):
        client.embed(["the cat"], model="default-prompt", prompt_name="summary")
    with pytest.raises(InvalidRequestError, match="dimensions must be at most 24.*was 25"):
        client.embed(["the cat"], model="default-prompt", dimensions=25)


@pytest.mark.parametrize("name", ["fixed-unattended", "fixed-attended", "min"])
def test_inspect_and_encode_give_the_same_rows(client: EncoderClient, name: str) -> None:
    for task in (None, "query", "document"):
        inspected = client.inspect("the cat: sat.", attention=False, model=name, task=task)
        encoded = client.run(["the cat: sat."], model=name, task=task, include_token_strings=True)
        assert inspected.sequence.tokens == encoded.sequences[0].tokens
        assert inspected.hidden_states is not None
        assert worst_relative_error(inspected.hidden_states[-1], encoded.outputs[0].arrays()[0]) <= 1e-5


def test_pool_factor_pools_token_vectors_as_the_library_does(zoo: Zoo, client: EncoderClient) -> None:
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    name, way = "skipped-in-queries", Way("document")
    rows = [torch.from_numpy(it.copy()) for it in served(client, name, way, TEXTS)]
    want = HierarchicalTokenPooling(3.0).pool(rows, task="document")
    got = served(client, name, way, TEXTS, pool_factor=3.0)
    assert any(len(it) < len(whole) for it, whole in zip(got, rows, strict=True))
    assert_same("multi_vector", got, [it.numpy() for it in want])


@pytest.mark.parametrize("name", ["fixed-attended", "min"])
def test_maxsim_scores_and_html_report_equal_the_library(
    zoo: Zoo, server: RealServer, client: EncoderClient, name: str, tmp_path: Path
) -> None:
    """MaxSim scores, and the score in an HTML report, equal the scores of the library.

    The score of the model `fixed-attended` is MaxSim. The score of `min` is MaxSim, divided by the number of query
    vectors.
    """
    library = zoo.library(name)
    queries, documents = [text_of(1 + i, seed=i) for i in range(5)], [text_of(2 * i, seed=99 + i) for i in range(20)]
    want = library.similarity(library.encode_query(queries), library.encode_document(documents)).numpy()
    query_vectors = served(client, name, Way("query"), queries)
    document_vectors = served(client, name, Way("document"), documents)
    got = [[maxsim(query, it, library.similarity_fn_name) for it in document_vectors] for query in query_vectors]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    page = tmp_path / "page.html"
    command = ["--target", server.target, "similarity", queries[1], documents[9], "--model", name, "--html", str(page)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', page.read_text(), re.DOTALL)
    assert data
    (match,) = json.loads(data[1])["matches"]
    assert sum(match["figure"]["added"]) == pytest.approx(want[1, 9], rel=1e-4)


def test_one_bge_m3_call_gives_the_three_outputs_of_flag_embedding(
    zoo: Zoo, server: RealServer, client: EncoderClient
) -> None:
    kinds: list[TrainedKind] = ["model", "sparse", "multi_vector"]
    outputs = client.run(SPARSE_TEXTS, model="bge-m3", outputs=kinds, truncate=True).outputs
    dense, sparse, late = outputs[0].matrix(), outputs[1].sparse_vectors(), outputs[2].arrays()
    for i, (want_dense, want_weights, want_vectors) in enumerate(_by_the_authors_code(zoo.directory("bge-m3"))):
        assert_same("dense", [dense[i][None]], [want_dense], i)
        assert_same("sparse", [sparse[i].dense()[None]], [want_weights], i)
        assert_same("multi_vector", [late[i]], [want_vectors], i)
    body = {"input": SPARSE_TEXTS, "model": "bge-m3", "task": "token_embed"}
    for answer, vectors in zip(_post(server, "/pooling", body)["data"], late, strict=True):
        np.testing.assert_array_equal(_reshaped(answer), vectors)


def _by_the_authors_code(directory: Path) -> Iterator[tuple[Array, Array, Array]]:
    """Compute the outputs of BGE-M3 for each text, with the same steps as FlagEmbedding's modeling.py.

    If a token id occurs several times, its sparse weight is the largest of the weights. Special tokens have the
    weight 0.

    Yields:
        The dense vector (1, d_model), the sparse weights (1, vocab) and the token vectors (tokens, width).
    """
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, add_pooling_layer=False).eval()
    late, sparse = (torch.load(directory / f"{name}_linear.pt", weights_only=True) for name in ("colbert", "sparse"))
    special = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for text in SPARSE_TEXTS:
        ids = tokenizer(text, return_tensors="pt", truncation=True)["input_ids"]  # (1, seq)
        with torch.no_grad():
            rows = model(input_ids=ids).last_hidden_state[0]  # (seq, d_model)
        vectors = torch.nn.functional.normalize(rows[1:] @ late["weight"].T + late["bias"], dim=-1)
        weights = np.zeros((1, model.config.vocab_size), np.float32)
        for token, weight in zip(ids[0].tolist(), (rows @ sparse["weight"].T + sparse["bias"]).relu(), strict=True):
            if token not in special:
                weights[0, token] = max(weights[0, token], weight.item())
        yield torch.nn.functional.normalize(rows[:1], dim=-1).numpy(), weights, vectors.numpy()


def test_a_static_model_gives_zeros_for_a_text_without_known_tokens(client: EncoderClient) -> None:
    outputs = [Output("model"), Output("tokens"), Output("max", l2_normalize=True)]
    result = client.run(["東京", "ab", ""], outputs=outputs, model="model2vec")
    assert [it.token_count for it in result.sequences] == [0, 2, 0]
    for output in (result.outputs[0], result.outputs[2]):
        assert not output.matrix()[[0, 2]].any()
        assert output.matrix()[1].any()
    with pytest.raises(InvalidRequestError, match="at least one token id; was empty"):
        client.embed([[]], model="model2vec")
    long = "a" * 8200
    with pytest.raises(InvalidRequestError, match="at most 8192 tokens .* was 8200"):
        client.embed([long], model="model2vec")
    assert client.run([long], model="model2vec", truncate=True).sequences[0].truncated
