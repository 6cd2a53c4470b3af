"""The literal space_id of fixed models. A change here breaks every index whose owner kept an id: never change one.

What counts may change only with a new version, under another prefix than s2.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import space_models
import torch
from onnx import numpy_helper
from onnx_files import build
from packaging.requirements import Requirement
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from encserve_export import OnnxOptions, Target, export_checkpoint, export_hf, export_onnx
from encserve_export.bundle import space
from encserve_export.bundle.space import digest_model, space_id
from encserve_proto.bundle.v1 import manifest_pb2

ROOT = Path(__file__).parent.parent.parent
TEXTS = "6201f4f3df9cddc64ff44646d355e6f0bd7a2ffd5e18242ca61f9609a6118f58"
# Each with how it is made and its id.
DIRECTORIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "bert": (space_models.write_encoder, {}, "s2-afaab798d1009257a7b9f2ef719e60a7"),
    "bert in int8": (space_models.write_encoder, {"precision": "int8"}, "s2-169e50b807525f9a39b37f6f16f55eed"),
    "byte pairs": (space_models.write_pairs, {"pooling": "cls"}, "s2-83184e90731d2006633e435e0c737404"),
    "dense": (space_models.write_dense, {}, "s2-58082c3b36ca4ad44940a8679d752b16"),
    "multi-vector": (space_models.write_multi_vector, {}, "s2-2bbd79feb286d0644c6945b87477044a"),
    "sparse": (space_models.write_sparse, {}, "s2-38819feada3a148b1b87c4e8a5f4fe01"),
    "static queries": (space_models.write_static_queries, {}, "s2-5fcc6abd3dc9ab8ba2c64eeb393654f7"),
    "bge-m3": (space_models.write_bge_m3, {}, "s2-23460e4ec4495ced303aaebfa542abcc"),
}
STATE_DICT = "s2-507c6717cada2857ee6a11aa27d71844"
ONNX_ALONE = "s2-930ef32770b161dd2c328140bc7eba71"
STATE_AND_CONFIGURATION = "s2-bcdd3afa4f016c26204db0d08095c119"


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory(name: str, tmp_path: Path) -> None:
    write, options, pinned = DIRECTORIES[name]
    target = Target(model_repository=tmp_path / "models", name="m")
    assert export_hf(write(tmp_path / "m"), target, **options).manifest.space_id == pinned


def test_a_state_dict(tmp_path: Path) -> None:
    shapes = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).state_dict()
    tensors = {name: space_models.fill(name, *it.shape) for name, it in shapes.items()}
    path = tmp_path / "weights.pt"
    torch.save({**tensors, "embedding.weight": space_models.fill("embedding", 50, 16)}, path)
    fields = {"n_heads": 2, "activation": "relu", "norm": "post", "position": "sinusoidal", "scale_embedding": False}
    exported = export_checkpoint(path, Target(model_repository=tmp_path, name="m"), fields=fields)
    assert exported.manifest.space_id == STATE_DICT


def test_an_onnx_file_alone(tmp_path: Path) -> None:
    model = build()
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            exact = space_models.fill(tensor.name, *tensor.dims).numpy()
            tensor.CopyFrom(numpy_helper.from_array(exact, tensor.name))
    onnx.save(model, tmp_path / "model.onnx")
    target, options = Target(model_repository=tmp_path, name="m"), OnnxOptions(max_sequence_tokens=20)
    assert export_onnx(tmp_path / "model.onnx", target, options).manifest.space_id == ONNX_ALONE


def test_tensors_and_a_configuration(tmp_path: Path) -> None:
    """As a module of one's own is named: by its state dict and what its author says of it."""
    tensors = {"weight": space_models.fill("weight", 4, 4), "half": torch.tensor([0.5, -2.0], dtype=torch.bfloat16)}
    configuration = {"heads": 2, "scale": 0.1, "names": ["é", None, True], "eps": 1e-12, "theta": 10000.0}
    manifest = manifest_pb2.Manifest(pooling=manifest_pb2.POOLING_MEAN, l2_normalize=True)
    manifest.encoder.max_sequence_tokens = 24
    manifest.graph.precision = "float32"
    assert space_id(manifest, digest_model(tensors, configuration), (), tmp_path) == STATE_AND_CONFIGURATION


def test_the_definition_followed_by_another_program(tmp_path: Path) -> None:
    """docs/models.md, step by step, of the files of "dense" alone."""
    folder = space_models.write_dense(tmp_path)

    def digest(facts: Any) -> str:
        plain = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(plain.encode()).hexdigest()

    def tensors(path: Path) -> dict[str, Any]:
        return {
            name: [str(its.dtype), list(its.shape), hashlib.sha256(its.tobytes()).hexdigest()]
            for name, its in load_file(path).items()
        }

    texts = json.loads((Path(space.__file__).parent / "s2_texts.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in texts]
    said = {"tokens": space_models.VOCABULARY, "merges": [], "scores": [], "ids": ids}
    configuration = json.loads((folder / "config.json").read_text())
    facts = {
        "model": digest({"configuration": configuration, "tensors": tensors(folder / "model.safetensors")}),
        "max_sequence_tokens": 32,
        "vectors": {
            "pooling": "POOLING_MEAN",
            "l2_normalize": True,
            "prompts": {"query": "query : "},
            "default_prompt_name": "query",
            "text": {},
            "query": {"prompt_name": "query"},
            "document": {},
        },
        "modules": [
            {
                "kind": "Dense",
                "settings": {"activation_function": "ReLU"},
                "tensors": tensors(folder / "2_Dense" / "model.safetensors"),
            },
            {"kind": "LayerNorm", "settings": {}, "tensors": tensors(folder / "3_LayerNorm" / "model.safetensors")},
        ],
        "tokenizer": digest(said),
        "static_tokenizers": {},
        "quantized": None,
    }
    assert f"s2-{digest(facts)[:32]}" == DIRECTORIES["dense"][2]


def test_the_texts_of_this_version() -> None:
    assert hashlib.sha256(json.dumps(space.texts()).encode()).hexdigest() == TEXTS


@pytest.mark.system
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_libraries_that_are_allowed_give_the_same(which: str, tmp_path: Path) -> None:
    """sentence-transformers and transformers by themselves in a folder that comes first; the rest is as installed."""
    declared = tomllib.loads((ROOT / "export" / "pyproject.toml").read_text())["project"]
    listed = [*declared["dependencies"], *(it for extra in declared["optional-dependencies"].values() for it in extra)]
    allowed = {it.name: it.specifier for it in map(Requirement, listed)}
    wanted = [f"{name}{allowed[name]}" for name in ("sentence-transformers", "transformers")]
    if which == "oldest":
        wanted = [re.sub(r"^([a-z-]+).*>=([0-9.]+).*", r"\1==\2", it) for it in wanted]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    subprocess.run([*pip, *wanted], check=True)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    others = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "not packaging"]
    done = subprocess.run(
        others, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
