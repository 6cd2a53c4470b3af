"""Clients of other projects and our client get bit-identical vectors from the same server.

The programs `*_judge.py` call the server with these clients.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import MODEL
from judging import (
    JUDGES,
    ROOT,
    TEXTS,
    go_example,
    missing,
    npm_folder,
    program,
    python_environment,
    run,
    source_folder,
)
from page_code import blocks, run_commands
from real_server import RealServer

from encserve_client import EncoderClient

pytestmark = pytest.mark.timeout(900)  # the first run installs the clients

Array = npt.NDArray[Any]
BinOf = Callable[[str], Path]
IDS = [[101, 1045, 3305, 2023, 102], [101, 1998, 2008, 102]]


@pytest.fixture(scope="module")
def vectors(client: EncoderClient) -> Array:
    """Our client's vectors of TEXTS, not normalized, in the shape (texts, width), float32."""
    return client.embed(TEXTS)


@pytest.fixture(scope="module")
def unit_vectors(client: EncoderClient) -> Array:
    """Our client's vectors of TEXTS, normalized, in the shape (texts, width), float32."""
    return client.embed(TEXTS, l2_normalize=True)


def judge(
    bin_folder: Path, name: str, address: str, folder: Path, **variables: str
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Run a program of tests/judges. Return the vectors, and the other results that the program prints as JSON."""
    longest = max(map(len, IDS))
    requests = {
        "texts": TEXTS,
        "ids": [ids + [0] * (longest - len(ids)) for ids in IDS],
        "mask": [[1] * len(ids) + [0] * (longest - len(ids)) for ids in IDS],
    }
    (folder / "requests.json").write_text(json.dumps(requests))
    command = [bin_folder / "python", JUDGES / name, address, MODEL, folder / "requests.json", folder / "results.npz"]
    facts = run(command, environment=variables)
    with np.load(folder / "results.npz") as file:
        return dict(file), json.loads(facts.splitlines()[-1])


def assert_same_bits(got: Array, want: Array) -> None:
    assert got.shape == want.shape
    assert got.astype(np.float32).tobytes() == want.tobytes()


def check_ranks(ranks: list[tuple[int, float]], unit_vectors: Array) -> None:
    """Check the ranks of TEXTS for the first text as the query. The right scores are the cosine similarities."""
    cosines = unit_vectors @ unit_vectors[0]
    order = np.argsort(-cosines, kind="stable").tolist()
    assert [index for index, _ in ranks] == order
    np.testing.assert_allclose([score for _, score in ranks], cosines[order], atol=1e-6)


def check_triton(got: dict[str, Array], facts: dict[str, Any], client: EncoderClient, vectors: Array) -> None:
    """Check the results of Triton's gRPC client or HTTP client."""
    for name in ("sync", "async_infer", "aio"):
        assert_same_bits(got[name], vectors)
    np.testing.assert_array_equal(got["half"], vectors.astype(np.float16))
    assert got["lengths"].tolist() == [5, 4]
    for padded, rows in zip(got["last_hidden_state"], client.token_vectors(IDS), strict=True):
        assert_same_bits(padded[: len(rows)], rows)
        assert not padded[len(rows) :].any()
    assert_same_bits(got["embedding_of_ids"], client.embed(IDS))
    assert (facts["ready"], facts["unknown_ready"], facts["request_id"]) == ([True] * 3, False, "an id")
    assert [output["name"] for output in facts["metadata"]["outputs"]] == ["last_hidden_state", "lengths", "embedding"]
    assert "input_ids[0, 0]: must be from 0 to 30521" in facts["error"][1]


def test_tritonclient(minilm: RealServer, client: EncoderClient, vectors: Array, bin_of: BinOf, tmp_path: Path) -> None:
    got, facts = judge(bin_of("clients"), "triton_judge.py", minilm.target, tmp_path)
    check_triton(got, facts, client, vectors)
    for name in ("stream", "aio_stream"):
        assert_same_bits(got[name], vectors)
    assert facts["config"]["config"]["name"] == MODEL
    assert facts["error"][0] == "StatusCode.INVALID_ARGUMENT"
    (statistics,) = facts["statistics"]["model_stats"]
    assert int(statistics["inference_stats"]["success"]["count"]) >= 4
    assert int(statistics["inference_stats"]["fail"]["count"]) >= 1


def test_tritonclient_over_http(
    minilm: RealServer, client: EncoderClient, vectors: Array, bin_of: BinOf, tmp_path: Path
) -> None:
    got, facts = judge(bin_of("clients"), "triton_http_judge.py", minilm.url, tmp_path)
    check_triton(got, facts, client, vectors)
    for name in ("json", "mixed"):
        assert_same_bits(got[name], vectors)
    assert_same_bits(got["embedding_of_ids_32"], client.embed(IDS))
    assert MODEL in [model["name"] for model in facts["index"]]
    assert facts["config"]["name"] == facts["statistics"]["model_stats"][0]["name"] == MODEL
    assert facts["error"][0] == "400"


def perf_analyzer() -> tuple[Path, dict[str, str]]:
    """Return the path of perf_analyzer and the environment variables that it needs."""
    binaries = python_environment("perf-analyzer")
    (library,) = binaries.parent.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")
    environment = {"LD_LIBRARY_PATH": str(library)}
    lacking = re.findall(r"(\S+) => not found", run(["ldd", binaries / "perf_analyzer"], environment=environment))
    if lacking:
        missing(f"perf_analyzer does not find {lacking} (apt-get install libb64-0d)")
    return binaries / "perf_analyzer", environment


@pytest.mark.parametrize(("protocol", "streaming"), [("grpc", False), ("grpc", True), ("http", False)])
def test_perf_analyzer(minilm: RealServer, tmp_path: Path, protocol: str, streaming: bool) -> None:
    """Run Triton's load generator. At least 150 requests succeed, and the report has queue times.

    Four requests are in flight at a time.
    """
    analyzer, environment = perf_analyzer()
    data = tmp_path / "data.json"
    if streaming:
        data.write_text(json.dumps({"data": [{"text": {"content": [TEXTS[0]], "shape": [1]}}]}))
    else:
        ones = {"content": [1] * 5, "shape": [1, 5]}
        ids = {"content": IDS[0], "shape": [1, 5]}
        data.write_text(json.dumps({"data": [{"input_ids": ids, "attention_mask": ones}]}))
    address = minilm.target if protocol == "grpc" else minilm.url.removeprefix("http://")
    flags = ["-m", MODEL, "-i", protocol, "-u", address, "--input-data", data, "--concurrency-range", "4"]
    flags += ["--measurement-mode", "count_windows", "--measurement-request-count", "50"]
    flags += ["--stability-percentage", "999", *(["--streaming"] if streaming else [])]
    report = run([analyzer, *flags], environment=environment)
    assert "Failed" not in report
    counts = {name: int(count) for name, count in re.findall(r"(Request|Inference|request) count: (\d+)", report)}
    assert counts["Request"] >= 150  # three measurements with 50 requests each
    # At the start of a measurement, up to four replies may be on their way to the client. The client counts these
    # replies in this measurement, but the server has already counted them.
    assert counts["request"] >= counts["Request"] - 3 * 4
    assert "queue" in report


def test_commands_of_the_page_of_open_inference(minilm: RealServer, tmp_path: Path) -> None:
    """Run the commands of the page: curl gets vectors, and perf_analyzer measures the throughput.

    The test changes the options of perf_analyzer, so that the measurement takes less time.
    """
    analyzer, environment = perf_analyzer()
    curl, analyze = (it.code for it in blocks("how-to/kserve-and-triton.md") if it.language == "bash")
    reply = json.loads(run_commands(tmp_path, curl.replace("http://127.0.0.1:8080", minilm.url)))
    assert reply["outputs"][0]["shape"] == [2, 384]
    short = "2 --measurement-mode count_windows --measurement-request-count 20 --stability-percentage 999"
    analyze = analyze.replace("localhost:50051", minilm.target).replace("1:8", short)
    path = f"{analyzer.parent}{os.pathsep}{os.environ['PATH']}"
    report = run_commands(tmp_path, analyze, PATH=path, **environment)
    assert "Failed" not in report
    assert "throughput" in report.lower()


def test_openai(minilm: RealServer, unit_vectors: Array, bin_of: BinOf, tmp_path: Path) -> None:
    """OpenAI's client gets the same vectors as our client.

    With default settings, LangChain gets an error. The error message names the setting to use. With default
    settings, LangChain also needs OpenAI's vocabulary. Usually, tiktoken downloads this vocabulary. In this test,
    tiktoken reads the vocabulary from the package litellm.
    """
    (litellm,) = python_environment("gateways").parent.glob("lib/python*/site-packages/litellm")
    vocabularies = f"{litellm / 'litellm_core_utils/tokenizers'}"
    got, facts = judge(bin_of("clients"), "openai_judge.py", minilm.url, tmp_path, TIKTOKEN_CACHE_DIR=vocabularies)
    for name in ("base64", "float", "async"):
        assert_same_bits(got[name], unit_vectors)
    assert MODEL in facts["models"]
    assert facts["usage"] > len(TEXTS)
    assert "unknown" in facts["unknown_model"]
    status, message = facts["langchain_default"]
    assert (status, "check_embedding_ctx_length=False" in message) == (400, True)


def test_openais_own_tests(minilm: RealServer) -> None:
    """Run OpenAI's own tests of embeddings and models against the server. All chosen tests pass.

    Two kinds of tests are left out: tests that delete models, and tests with strict validation but without
    encoding_format. Without encoding_format, the client requests base64, but strict validation rejects base64.
    """
    sources = source_folder("openai")
    files = [f"tests/api_resources/test_{name}.py" for name in ("embeddings", "models")]
    chosen = "not delete and not (Embeddings and (strict or aiohttp) and not all_params)"
    flags = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-k", chosen, *files]
    variables = {"TEST_API_BASE_URL": f"{minilm.url}/v1"}
    report = run([python_environment("clients") / "python", "-m", "pytest", *flags], cwd=sources, environment=variables)
    assert re.findall(r"^(\d+ passed, \d+ deselected)", report, re.MULTILINE) == ["46 passed, 29 deselected"]


def test_kserve(minilm: RealServer, client: EncoderClient, vectors: Array, bin_of: BinOf, tmp_path: Path) -> None:
    got, facts = judge(bin_of("gateways"), "kserve_judge.py", f"{minilm.target},{minilm.url}", tmp_path)
    for name in ("grpc", "grpc_list", "grpc_typed", "rest", "rest_json", "rest_column"):
        assert_same_bits(got[name], vectors)
    for name in ("grpc_ids", "rest_ids"):
        assert_same_bits(got[name], client.embed(IDS))
    assert facts["grpc_ready"] == facts["rest_ready"] == [True] * 3
    assert facts["rest_unknown_ready"] is False
    assert (facts["grpc_error"], facts["rest_error"]) == ("StatusCode.NOT_FOUND", 404)


def test_mlserver(minilm: RealServer, client: EncoderClient, vectors: Array, bin_of: BinOf, tmp_path: Path) -> None:
    got, facts = judge(bin_of("clients"), "mlserver_judge.py", f"{minilm.target},{minilm.url}", tmp_path)
    for name in ("strings", "strings_unset", "request_codec", "grpc", "grpc_raw"):
        assert_same_bits(got[name], vectors)
    assert_same_bits(got["arrays"], client.embed(IDS))
    assert "text" in facts["inputs"]
    assert facts["error"] == 404


def test_cohere(minilm: RealServer, unit_vectors: Array, bin_of: BinOf, tmp_path: Path) -> None:
    got, facts = judge(bin_of("gateways"), "cohere_judge.py", minilm.url, tmp_path)
    for name in ("v2", "v2_async", "v2_typed", "v2_inputs", "base64"):
        assert_same_bits(got[name], unit_vectors)
    assert_same_bits(got["v1"], np.tile(unit_vectors, (50, 1)))
    signed = np.clip(np.rint(unit_vectors * 127 * np.sqrt(unit_vectors.shape[1]) / 4), -128, 127)
    assert np.abs(got["int8"] - signed).max() <= 1  # a value halfway between two integers may be rounded up or down
    np.testing.assert_array_equal(got["uint8"], got["int8"] + 128)
    np.testing.assert_array_equal(got["v1_int8"], got["int8"])
    np.testing.assert_array_equal(got["ubinary"], np.packbits(unit_vectors > 0, axis=1))
    np.testing.assert_array_equal(got["binary"], got["ubinary"] - 128)
    assert got["cut"].shape == (len(TEXTS), 3)
    assert (facts["texts"], facts["version"], facts["unknown_model"], facts["start"]) == (TEXTS, "2", 404, 400)
    assert facts["id"]
    assert facts["tokens"] > len(TEXTS)
    assert facts["v1_units"] == facts["v2_units"] == 1
    assert [len(facts[name]) for name in ("v2_documents", "v1_documents")] == [2, len(TEXTS)]
    assert all(text == TEXTS[index] for index, text in facts["v1_documents"])


def vectors_of_lines(output: str) -> Array:
    """Parse the output of an example in another language. For each text, the output has a line with the vector."""
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    return np.array([line["vector"] for line in lines])


def ranks_of_lines(output: str) -> list[tuple[int, float]]:
    """Parse the ranks of an example in another language. The output has one line for each text, best text first."""
    lines = [json.loads(line) for line in output.splitlines()]
    return [(TEXTS.index(line["text"]), line["score"]) for line in lines]


def test_javascript(minilm: RealServer, vectors: Array, unit_vectors: Array) -> None:
    folder = npm_folder(ROOT / "clients/examples/javascript")
    command = [program("node", "nodejs"), "encode.js", minilm.target, *TEXTS]
    environment = {"ENCSERVE_PROTO": str(ROOT / "proto")}
    assert_same_bits(vectors_of_lines(run(command, cwd=folder, environment=environment)), vectors)
    command += ["--query", TEXTS[0]]
    check_ranks(ranks_of_lines(run(command, cwd=folder, environment=environment)), unit_vectors)


def test_go(minilm: RealServer, vectors: Array, unit_vectors: Array, tmp_path: Path) -> None:
    command = go_example(tmp_path)
    assert_same_bits(vectors_of_lines(run([command, minilm.target, *TEXTS])), vectors)
    check_ranks(ranks_of_lines(run([command, "--query", TEXTS[0], minilm.target, *TEXTS])), unit_vectors)
