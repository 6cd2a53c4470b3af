"""The lines that docs/http.md and docs/open-inference.md show, run as they stand: our own client's vectors come back.

The model is a small one with a real tokenizer, so that 1,000 documents of 2,000 characters take no time.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import MODEL, minilm_directory
from exporting import export_once
from judging import JUDGES, ROOT, npm_folder, program, python_environment, run
from real_server import RealServer, real_server
from scipy.stats import spearmanr

from encserve_client import EncoderClient
from encserve_export import Target, export_hf

pytestmark = pytest.mark.timeout(900)  # the first run installs the judges

Array = npt.NDArray[Any]
PAGE = ROOT / "docs/http.md"
# In which environment the lines below each heading run.
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
# A request of these holds at most 256 texts.
OPEN_INFERENCE = ("KServe", "MLServer", "tritonclient")
TEXTS = ["I understand this", "and that", "🌍 ein längerer Satz, der in mehr Tokens zerfällt als andere", "a" * 300]
QUIET = {
    "HF_HUB_OFFLINE": "0",  # which would keep Hugging Face's client from loopback too
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


def shown() -> dict[str, list[tuple[str, str]]]:
    """By tool the blocks of the section: their language and lines."""
    (section,) = re.findall(r"^## Tools\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    parts = re.split(r"^### (.+)\n", section, flags=re.MULTILINE)[1:]
    block = re.compile(r"^```(python|js)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return {tool: block.findall(part) for tool, part in zip(parts[::2], parts[1::2], strict=True)}


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
    """A file of 256 texts, and (True) one of 1,000, all but a few of 2,000 characters, and their vectors."""
    words, numbers = (minilm_directory() / "vocab.txt").read_text().split()[2000:12000], random.Random(0)
    documents = [" ".join(numbers.choices(words, k=500))[:2000] for _ in range(1000)]
    made, every = {}, [*TEXTS, *documents]
    with EncoderClient(server.target) as client:
        for many, texts in {False: every[:256], True: every}.items():
            file = tmp_path_factory.mktemp("requests") / "requests.json"
            file.write_text(json.dumps({"texts": texts}))
            made[many] = file, client.embed(texts, truncate=True, l2_normalize=True)
    return made


def addressed(lines: str, server: RealServer) -> str:
    """With the server's ports in place of those that the page has."""
    for port, its in ((8080, server.http_port), (50051, server.grpc_port)):
        lines = re.sub(rf"\b(?:127\.0\.0\.1|localhost):{port}\b", f"127.0.0.1:{its}", lines)
    return lines


def assert_as_ours(got: Array, want: Array, lines: str) -> None:
    if "similarities" in lines:
        np.testing.assert_allclose(got, want[1:] @ want[0], rtol=0, atol=1e-6)
    else:
        assert got.shape == want.shape
        assert got.astype(np.float32).tobytes() == want.tobytes()


def test_each_tool_has_its_lines() -> None:
    assert shown().keys() == {*ENVIRONMENTS, "MTEB"}


@pytest.mark.parametrize("tool", ENVIRONMENTS)
def test_python(server: RealServer, requests: dict[bool, tuple[Path, Array]], tmp_path: Path, tool: str) -> None:
    blocks = {tmp_path / f"{i}.py": lines for i, (kind, lines) in enumerate(shown()[tool]) if kind == "python"}
    for path, lines in blocks.items():
        path.write_text(addressed(lines, server))
    assert blocks
    file, want = requests[tool not in OPEN_INFERENCE]
    run([python_environment(ENVIRONMENTS[tool]) / "python", JUDGES / "tool.py", file, *blocks], environment=QUIET)
    for path, lines in blocks.items():
        assert_as_ours(np.load(path.with_suffix(".npy")), want, lines)


def test_open_inference(server: RealServer, requests: dict[bool, tuple[Path, Array]], tmp_path: Path) -> None:
    """The blocks of its page, which bring texts of their own; the clients of the two do not go into one process."""
    page = (ROOT / "docs/open-inference.md").read_text()
    file, want = requests[False]
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for environment, lines in zip(("clients", "gateways"), blocks, strict=True):
        path = tmp_path / f"{environment}.py"
        path.write_text(addressed(lines, server))
        run([python_environment(environment) / "python", JUDGES / "tool.py", file, path])
        assert_as_ours(np.load(path.with_suffix(".npy")), want[:2], lines)


def test_langchain_for_javascript(server: RealServer, requests: dict[bool, tuple[Path, Array]], tmp_path: Path) -> None:
    ((_, lines),) = [block for block in shown()["LangChain"] if block[0] == "js"]
    folder = npm_folder(JUDGES / "langchain-js")
    (folder / "lines.mjs").write_text(PROLOGUE + addressed(lines, server) + EPILOGUE)
    file, want = requests[True]
    run([program("node", "nodejs"), "lines.mjs", file, tmp_path / "results.json"], cwd=folder)
    assert_as_ours(np.array(json.loads((tmp_path / "results.json").read_text())), want, lines)


def test_mteb(server: RealServer, tmp_path: Path) -> None:
    """The scores are those of the vectors of our own client."""
    (tmp_path / "requests.json").write_text(json.dumps({"pairs": PAIRS}))
    blocks = [tmp_path / f"{i}.py" for i in range(len(shown()["MTEB"]))]
    for path, (_, lines) in zip(blocks, shown()["MTEB"], strict=True):
        path.write_text(addressed(lines, server))
    python = python_environment("mteb", beside_this=True) / "python"
    told = run([python, JUDGES / "mteb_judge.py", tmp_path / "requests.json", *blocks], cwd=tmp_path)
    first, second, likeness = zip(*PAIRS, strict=True)
    with EncoderClient(server.target) as client:
        one, other = (client.embed(texts, l2_normalize=True) for texts in (first, second))
    want = spearmanr(likeness, (one * other).sum(axis=1)).statistic
    np.testing.assert_allclose(json.loads(told.splitlines()[-1]), [want] * len(blocks), atol=1e-6)
