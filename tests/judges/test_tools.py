"""The docs contain code for other tools. This code returns the same vectors as our client.

The pages are docs/how-to/http-clients.md and docs/how-to/kserve-and-triton.md.

The model is a small BERT with a real tokenizer. So 1,000 documents of 2,000 characters are embedded in a short time.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import MODEL, minilm_directory
from docs_text import code_blocks
from exporting import export_once
from judging import JUDGES, ROOT, TEXTS, npm_folder, program, python_environment, run, with_ports
from real_server import RealServer, real_server
from scipy.stats import spearmanr

from encserve_client import EncoderClient
from encserve_export import Target, export_hf

pytestmark = pytest.mark.timeout(900)  # the first run installs the tools

Array = npt.NDArray[Any]
CLIENTS = ROOT / "docs/how-to/http-clients.md"
OPEN_INFERENCE_CLIENTS = ROOT / "docs/how-to/kserve-and-triton.md"
# For each tool, which is a heading of a page: the virtual environment that runs the code.
ENVIRONMENTS = {
    "openai": "clients",
    "LangChain": "clients",
    "LlamaIndex": "clients",
    "LiteLLM": "gateways",
    "Chroma": "gateways",
    "Haystack": "clients",
    "pymilvus": "gateways",
    "huggingface_hub": "clients",
    "Cohere": "gateways",
    "KServe": "gateways",
    "MLServer": "clients",
    "tritonclient": "clients",
}
PAIRS = [
    ("a cat sits on the mat", "a cat is sitting on a mat", 5.0),
    ("a dog runs", "a dog is running fast", 4.0),
    ("he plays the guitar", "the soup is cold", 0.0),
    ("a red apple", "a green bus", 1.0),
    ("two men talk", "people are talking", 3.0),
]
# The code for these tools sends all texts in one request. A request may have at most 256 texts.
OPEN_INFERENCE = ("KServe", "MLServer", "tritonclient")
QUIET = {
    "HF_HUB_OFFLINE": "0",  # with 1, Hugging Face's client would not call the server
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "ANONYMIZED_TELEMETRY": "False",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
}
EPILOGUE = """
import { writeFileSync } from "node:fs";
writeFileSync(process.argv[3], JSON.stringify(vectors));
"""
PROLOGUE = """
import { readFileSync } from "node:fs";
const { texts } = JSON.parse(readFileSync(process.argv[2], "utf8"));
"""


def blocks_by_tool() -> dict[str, list[tuple[str, str]]]:
    """Return the code blocks that send `texts` over HTTP, by tool. A block is the language and the code."""
    parts = re.split(r"^## (.+)\n", CLIENTS.read_text(), flags=re.MULTILINE)[1:]
    parts += re.split(r"^### (.+)\n", section("Over HTTP"), flags=re.MULTILINE)[1:]
    found = {tool: code_blocks(part, "python", "js") for tool, part in zip(parts[::2], parts[1::2], strict=True)}
    return {tool: blocks for tool, blocks in found.items() if blocks}


def section(heading: str) -> str:
    """Return a section of docs/how-to/kserve-and-triton.md."""
    (text,) = re.findall(
        rf"^## {heading}\n(.*?)^## ", OPEN_INFERENCE_CLIENTS.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return str(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    folder, models = tmp_path_factory.mktemp("small") / "model", tmp_path_factory.mktemp("models")
    shutil.copytree(minilm_directory(), folder, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(**{**config, **small})).save_pretrained(folder)
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "word_embedding_dimension": 16}))
    export_once(export_hf, folder, target=Target(model_repository=models, name=MODEL))
    with real_server(models, "--model", MODEL, "--http-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory, server: RealServer) -> dict[bool, tuple[Path, Array]]:
    """Two files with texts, each with our client's vectors. The key False has 256 texts, the key True has 1,004."""
    words, rng = (minilm_directory() / "vocab.txt").read_text().split()[2000:12000], random.Random(0)
    documents = [" ".join(rng.choices(words, k=500))[:2000] for _ in range(1000)]
    made, every = {}, [*TEXTS, *documents]
    with EncoderClient(server.target) as client:
        for many, texts in {False: every[:256], True: every}.items():
            file = tmp_path_factory.mktemp("requests") / "requests.json"
            file.write_text(json.dumps({"texts": texts}))
            made[many] = file, client.embed(texts, truncate=True, l2_normalize=True)
    return made


def assert_same(got: Array, want: Array, lines: str) -> None:
    if "similarities" in lines:
        np.testing.assert_allclose(got, want[1:] @ want[0], rtol=0, atol=1e-6)
    else:
        assert got.shape == want.shape
        assert got.astype(np.float32).tobytes() == want.tobytes()


def test_every_tool_of_the_pages_is_tested() -> None:
    assert blocks_by_tool().keys() == {*ENVIRONMENTS, "MTEB"}


@pytest.mark.parametrize("tool", ENVIRONMENTS)
def test_python_tools(
    server: RealServer,
    requests: dict[bool, tuple[Path, Array]],
    bin_of: Callable[[str], Path],
    tmp_path: Path,
    tool: str,
) -> None:
    blocks = {tmp_path / f"{i}.py": lines for i, (kind, lines) in enumerate(blocks_by_tool()[tool]) if kind == "python"}
    for path, lines in blocks.items():
        path.write_text(with_ports(lines, server))
    assert blocks
    file, want = requests[tool not in OPEN_INFERENCE]
    run([bin_of(ENVIRONMENTS[tool]) / "python", JUDGES / "tool.py", file, *blocks], environment=QUIET)
    for path, lines in blocks.items():
        assert_same(np.load(path.with_suffix(".npy")), want, lines)


def test_open_inference(server: RealServer, requests: dict[bool, tuple[Path, Array]], tmp_path: Path) -> None:
    """The two code blocks for gRPC return the same vectors as our client.

    The blocks run in two virtual environments, because tritonclient and kserve conflict. The code contains the first
    two texts of TEXTS.
    """
    file, want = requests[False]
    blocks = code_blocks(section("Over gRPC"), "python")
    for environment, (_, lines) in zip(("clients", "gateways"), blocks, strict=True):
        path = tmp_path / f"{environment}.py"
        path.write_text(with_ports(lines, server))
        run([python_environment(environment) / "python", JUDGES / "tool.py", file, path])
        assert_same(np.load(path.with_suffix(".npy")), want[:2], lines)


def test_langchain_for_javascript(server: RealServer, requests: dict[bool, tuple[Path, Array]], tmp_path: Path) -> None:
    ((_, lines),) = [block for block in blocks_by_tool()["LangChain"] if block[0] == "js"]
    folder = npm_folder(JUDGES / "langchain-js")
    (folder / "lines.mjs").write_text(PROLOGUE + with_ports(lines, server) + EPILOGUE)
    file, want = requests[True]
    run([program("node", "nodejs"), "lines.mjs", file, tmp_path / "results.json"], cwd=folder)
    assert_same(np.array(json.loads((tmp_path / "results.json").read_text())), want, lines)


def test_mteb(server: RealServer, tmp_path: Path) -> None:
    """The scores from MTEB equal Spearman's correlation, which the test computes with our client's vectors."""
    (tmp_path / "requests.json").write_text(json.dumps({"pairs": PAIRS}))
    blocks = [tmp_path / f"{i}.py" for i in range(len(blocks_by_tool()["MTEB"]))]
    for path, (_, lines) in zip(blocks, blocks_by_tool()["MTEB"], strict=True):
        path.write_text(with_ports(lines, server))
    python = python_environment("mteb", with_encserve=True) / "python"
    output = run([python, JUDGES / "mteb_judge.py", tmp_path / "requests.json", *blocks], cwd=tmp_path)
    first, second, similarity = zip(*PAIRS, strict=True)
    with EncoderClient(server.target) as client:
        one, other = (client.embed(texts, l2_normalize=True) for texts in (first, second))
    want = spearmanr(similarity, (one * other).sum(axis=1)).statistic
    np.testing.assert_allclose(json.loads(output.splitlines()[-1]), [want] * len(blocks), atol=1e-6)
