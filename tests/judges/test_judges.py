"""Clients that nobody here wrote, unchanged, against a real server: the same vectors as our own client, to the bit."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import MODEL, export_minilm
from judging import JUDGES, ROOT, missing, npm_folder, program, python_environment, run, source_folder
from real_server import RealServer, real_server

from encserve_client import EncoderClient

pytestmark = pytest.mark.timeout(900)  # the first run installs the judges

Array = npt.NDArray[Any]
TEXTS = [
    "I understand this",
    "and that",
    "🌍 ein längerer Satz, der in mehr Tokens zerfällt als andere",
    "a" * 300,
]
IDS = [[101, 1045, 3305, 2023, 102], [101, 1998, 2008, 102]]
NAMES_IN_OPENAIS_TESTS = ("text-embedding-3-small", "gpt-6-astra")
DEBIAN = (  # the same are in .ci/run
    "golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protobuf-compiler protoc-gen-go "
    "protoc-gen-go-grpc"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    models = tmp_path_factory.mktemp("models")
    export_minilm(models)
    aliases = [f"--served-model-name={name}={MODEL}" for name in NAMES_IN_OPENAIS_TESTS]
    with real_server(models, "--model", MODEL, "--http-port", "0", *aliases) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[EncoderClient]:
    with EncoderClient(server.target) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(client: EncoderClient) -> Array:
    """(texts, width) float32, as our own client gets them."""
    return client.embed(TEXTS)


def judge(
    name: str, address: str, folder: Path, environment: str = "clients", **variables: str
) -> tuple[dict[str, Array], dict[str, Any]]:
    """What a program of tests/judges got, and what it tells besides."""
    longest = max(map(len, IDS))
    requests = {
        "texts": TEXTS,
        "ids": [ids + [0] * (longest - len(ids)) for ids in IDS],
        "mask": [[1] * len(ids) + [0] * (longest - len(ids)) for ids in IDS],
    }
    (folder / "requests.json").write_text(json.dumps(requests))
    python = python_environment(environment) / "python"
    command = [python, JUDGES / name, address, MODEL, folder / "requests.json", folder / "results.npz"]
    told = run(command, environment=variables)
    with np.load(folder / "results.npz") as file:
        return dict(file), json.loads(told.splitlines()[-1])


def assert_same_bits(got: Array, want: Array) -> None:
    assert got.shape == want.shape
    assert got.astype(np.float32).tobytes() == want.tobytes()


def test_tritonclient(server: RealServer, client: EncoderClient, vectors: Array, tmp_path: Path) -> None:
    got, told = judge("triton_judge.py", server.target, tmp_path)
    for name in ("sync", "async_infer", "stream", "aio", "aio_stream"):
        assert got[name].dtype == np.float32
        assert_same_bits(got[name], vectors)
    np.testing.assert_array_equal(got["half"], vectors.astype(np.float16))
    assert got["lengths"].tolist() == [5, 4]
    for padded, its in zip(got["last_hidden_state"], client.encode(IDS), strict=True):
        assert_same_bits(padded[: len(its)], its)
        assert not padded[len(its) :].any()
    assert_same_bits(got["embedding_of_ids"], client.embed(IDS))
    assert (told["ready"], told["unknown_ready"], told["request_id"]) == ([True] * 3, False, "an id")
    assert [it["name"] for it in told["metadata"]["outputs"]] == ["last_hidden_state", "lengths", "embedding"]
    assert told["config"]["config"]["name"] == MODEL
    status, message = told["error"]
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert message.startswith("input_ids[0, 0]: must be from 0 to 30521")
    (statistics,) = told["statistics"]["model_stats"]
    assert int(statistics["inference_stats"]["success"]["count"]) == 4
    assert int(statistics["inference_stats"]["fail"]["count"]) == 1


@pytest.mark.parametrize(("protocol", "streaming"), [("grpc", False), ("grpc", True), ("http", False)])
def test_perf_analyzer(server: RealServer, tmp_path: Path, protocol: str, streaming: bool) -> None:
    """A whole run, its statistics included."""
    binaries = python_environment("perf-analyzer")
    analyzer = binaries / "perf_analyzer"
    (library,) = binaries.parent.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")
    environment = {"LD_LIBRARY_PATH": str(library)}
    lacking = re.findall(r"(\S+) => not found", run(["ldd", analyzer], environment=environment))
    if lacking:
        missing(f"perf_analyzer lacks {lacking} (apt-get install libb64-0d)")
    data = tmp_path / "data.json"
    if streaming:
        data.write_text(json.dumps({"data": [{"text": {"content": [TEXTS[0]], "shape": [1]}}]}))
    else:
        ones = {"content": [1] * 5, "shape": [1, 5]}
        ids = {"content": IDS[0], "shape": [1, 5]}
        data.write_text(json.dumps({"data": [{"input_ids": ids, "attention_mask": ones}]}))
    address = server.target if protocol == "grpc" else server.url.removeprefix("http://")
    flags = ["-m", MODEL, "-i", protocol, "-u", address, "--input-data", data, "--concurrency-range", "4"]
    flags += ["--measurement-mode", "count_windows", "--measurement-request-count", "50"]
    flags += ["--stability-percentage", "999", *(["--streaming"] if streaming else [])]
    report = run([analyzer, *flags], environment=environment)
    assert "Failed" not in report
    counts = {name: int(count) for name, count in re.findall(r"(Request|Inference|request) count: (\d+)", report)}
    assert counts["Request"] >= 150  # three windows
    assert counts["request"] >= counts["Request"]
    assert "queue" in report


def test_openai(server: RealServer, client: EncoderClient, tmp_path: Path) -> None:
    """And LangChain's default, whose vocabulary lies in LiteLLM's wheel: tiktoken would download it."""
    vectors = client.embed(TEXTS, l2_normalize=True)
    (litellm,) = python_environment("gateways").parent.glob("lib/python*/site-packages/litellm")
    vocabularies = f"{litellm / 'litellm_core_utils/tokenizers'}"
    got, told = judge("http_judge.py", server.url, tmp_path, TIKTOKEN_CACHE_DIR=vocabularies)
    for name in ("openai", "openai_float", "openai_async"):
        assert_same_bits(got[name], vectors)
    assert MODEL in told["models"]
    assert told["usage"] > len(TEXTS)
    assert "nobody" in told["unknown"]
    status, message = told["langchain_default"]
    assert status == 400
    assert "check_embedding_ctx_length=False" in message


def test_openais_own_tests(server: RealServer) -> None:
    """Those of embeddings and models, but for some.

    Models are deleted in the model repository. And with strict validation the client takes the base64 that it asks for
    by itself for an error, whichever server sends it: it expects numbers, as its authors' mock server sends.
    """
    sources = source_folder("openai")
    files = [f"tests/api_resources/test_{name}.py" for name in ("embeddings", "models")]
    chosen = "not delete and not (Embeddings and (strict or aiohttp) and not all_params)"
    flags = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-k", chosen, *files]
    variables = {"TEST_API_BASE_URL": f"{server.url}/v1"}
    report = run([python_environment("clients") / "python", "-m", "pytest", *flags], cwd=sources, environment=variables)
    assert re.findall(r"^(\d+ passed, \d+ deselected)", report, re.MULTILINE) == ["46 passed, 29 deselected"]


def test_tritonclient_over_http(server: RealServer, client: EncoderClient, vectors: Array, tmp_path: Path) -> None:
    got, told = judge("triton_http_judge.py", server.url, tmp_path)
    for name in ("sync", "json", "mixed", "async_infer", "aio"):
        assert_same_bits(got[name], vectors)
    np.testing.assert_array_equal(got["half"], vectors.astype(np.float16))
    assert got["lengths"].tolist() == [5, 4]
    for padded, its in zip(got["last_hidden_state"], client.encode(IDS), strict=True):
        assert_same_bits(padded[: len(its)], its)
    for name in ("embedding_of_ids", "embedding_of_ids_32"):
        assert_same_bits(got[name], client.embed(IDS))
    assert (told["ready"], told["unknown_ready"], told["request_id"]) == ([True] * 3, False, "an id")
    assert [it["name"] for it in told["metadata"]["outputs"]] == ["last_hidden_state", "lengths", "embedding"]
    assert [it["name"] for it in told["index"]] == [MODEL]
    assert told["config"]["name"] == MODEL
    status, message = told["error"]
    assert status == "400"
    assert "input_ids[0, 0]: must be from 0 to 30521" in message
    assert told["statistics"]["model_stats"][0]["name"] == MODEL


def test_kserve(server: RealServer, client: EncoderClient, vectors: Array, tmp_path: Path) -> None:
    got, told = judge("kserve_judge.py", f"{server.target},{server.url}", tmp_path, "gateways")
    for name in ("grpc", "grpc_list", "grpc_typed", "rest", "rest_json", "rest_column"):
        assert_same_bits(got[name], vectors)
    for name in ("grpc_ids", "rest_ids"):
        assert_same_bits(got[name], client.embed(IDS))
    assert told["grpc_ready"] == told["rest_ready"] == [True] * 3
    assert told["rest_unknown_ready"] is False
    assert told["grpc_error"][0] == "StatusCode.NOT_FOUND"
    assert told["rest_error"][0] == 404


def test_mlserver(server: RealServer, client: EncoderClient, vectors: Array, tmp_path: Path) -> None:
    got, told = judge("mlserver_judge.py", f"{server.target},{server.url}", tmp_path)
    for name in ("strings", "strings_unset", "request_codec", "grpc", "grpc_raw"):
        assert_same_bits(got[name], vectors)
    assert_same_bits(got["arrays"], client.embed(IDS))
    assert "text" in told["inputs"]
    assert told["error"][0] == 404


def test_cohere(server: RealServer, client: EncoderClient, tmp_path: Path) -> None:
    vectors = client.embed(TEXTS, l2_normalize=True)
    got, told = judge("cohere_judge.py", server.url, tmp_path, "gateways")
    for name in ("v2", "v2_async", "v2_typed", "v2_inputs", "base64"):
        assert_same_bits(got[name], vectors)
    assert_same_bits(got["v1"], np.tile(vectors, (50, 1)))
    signed = np.clip(np.rint(vectors * 127 * np.sqrt(vectors.shape[1]) / 4), -128, 127)
    assert np.abs(got["int8"] - signed).max() <= 1  # of a number that lies between two
    np.testing.assert_array_equal(got["uint8"], got["int8"] + 128)
    np.testing.assert_array_equal(got["v1_int8"], got["int8"])
    np.testing.assert_array_equal(got["ubinary"], np.packbits(vectors > 0, axis=1))
    np.testing.assert_array_equal(got["binary"], got["ubinary"] - 128)
    assert got["cut"].shape == (len(TEXTS), 3)
    assert (told["texts"], told["v1_texts"], told["version"]) == (TEXTS, True, "2")
    assert told["id"]
    assert told["tokens"] > len(TEXTS)
    statuses = {name: told[name][1] for name in ("model", "start", "image", "types", "long")}
    assert statuses == {"model": 404, "start": 400, "image": 400, "types": 400, "long": 400}


def lines_of(output: str) -> Array:
    """The vectors of the examples' lines."""
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["text"] for line in lines] == TEXTS
    return np.array([line["vector"] for line in lines])


def test_javascript(server: RealServer, vectors: Array) -> None:
    folder = npm_folder(ROOT / "clients/examples/javascript")
    command = [program("node", "nodejs"), "encode.js", server.target, *TEXTS]
    environment = {"ENCSERVE_PROTO": str(ROOT / "proto")}
    assert_same_bits(lines_of(run(command, cwd=folder, environment=environment)), vectors)


def test_go(server: RealServer, vectors: Array, tmp_path: Path) -> None:
    """As its README says."""
    go = program("go", DEBIAN)
    for plugin in ("protoc", "protoc-gen-go", "protoc-gen-go-grpc"):
        program(plugin, DEBIAN)
    build = tmp_path / "build"
    (build / "src").mkdir(parents=True)
    out = [f"--go_out={build}/src", f"--go-grpc_out={build}/src"]
    run(["protoc", "-I", ROOT / "proto", *out, "encserve/v1/encoder.proto"])
    shutil.copy(ROOT / "clients/examples/go/main.go", tmp_path)
    environment = {"GO111MODULE": "off", "GOPATH": f"{build}:/usr/share/gocode", "GOCACHE": str(ROOT / ".cache/go")}
    output = run([go, "run", "main.go", server.target, *TEXTS], cwd=tmp_path, environment=environment)
    assert_same_bits(lines_of(output), vectors)
