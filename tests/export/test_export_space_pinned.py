"""The tests compare the space_ids of fixed models with the expected ids in this file.

A space_id identifies the vectors of a model. Users store the id with an index. So the id of a model must never change.
If we change the computation, the new ids need another prefix in place of s3.
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
from onnx import TensorProto, numpy_helper
from onnx_files import build
from packaging.requirements import Requirement
from safetensors.numpy import load_file

from encserve_export import Target, export_checkpoint, export_hf
from encserve_export.bundle.space import digest_model, digest_onnx, space_id
from encserve_export.onnx_graph.interface import Interface
from encserve_proto.bundle.v1 import manifest_pb2

ROOT = Path(__file__).parent.parent.parent
# For each model: the function that writes the model, the options of the export, and the space_id.
DIRECTORIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "bert in int8": (space_models.write_encoder, {"precision": "int8"}, "s3-070c04785e584ed82994950abb9cef96"),
    "byte pairs": (space_models.write_pairs, {"pooling": "cls"}, "s3-1db9b6958daecf028b9a9537d6a76933"),
    "dense": (space_models.write_dense, {}, "s3-06dbeaf43a86cd6e5de42d3c3f713187"),
    "multi-vector": (space_models.write_multi_vector, {}, "s3-4c26da688a78e4058909ec1b3b3effc2"),
    "static queries": (space_models.write_static_queries, {}, "s3-00bb8ebbad8f9880f7fea138828de850"),
    "bge-m3": (space_models.write_bge_m3, {}, "s3-403d303ef08e3b119e784700b8c78b6a"),
}
STATE_DICT = "s3-a9cef04f49e14e9dcfa9a7ce97d56277"
ONNX = "5c20f8bcfe97db960cb71070f887d676e98aa19f18cfde7feb95e107064892d9"
TENSORS_AND_CONFIGURATION = "s3-134714750e47e1fe683d1e53b848e5d4"


@pytest.mark.system
@pytest.mark.parametrize("name", DIRECTORIES)
def test_the_id_of_a_directory_is_fixed(name: str, tmp_path: Path) -> None:
    write, options, pinned = DIRECTORIES[name]
    target = Target(model_repository=tmp_path / "models", name="m")
    assert export_hf(write(tmp_path / "m"), target, **options).manifest.space_id == pinned


def test_the_id_of_a_state_dict_is_fixed(tmp_path: Path) -> None:
    shapes = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).state_dict()
    tensors = {name: space_models.fill(name, *tensor.shape) for name, tensor in shapes.items()}
    path = tmp_path / "weights.pt"
    torch.save({**tensors, "embedding.weight": space_models.fill("embedding", 50, 16)}, path)
    fields = {"n_heads": 2, "activation": "relu", "norm": "post", "position": "sinusoidal", "scale_embedding": False}
    exported = export_checkpoint(path, Target(model_repository=tmp_path, name="m"), fields=fields)
    assert exported.manifest.space_id == STATE_DICT


def test_the_id_of_an_onnx_file_is_fixed() -> None:
    model = build()
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            exact = space_models.fill(tensor.name, *tensor.dims).numpy()
            tensor.CopyFrom(numpy_helper.from_array(exact, tensor.name))
    onnx.checker.check_model(model)
    assert digest_onnx(model, Interface("input_ids", "attention_mask", "", "rows")) == ONNX


def test_the_id_of_tensors_and_a_configuration_is_fixed(tmp_path: Path) -> None:
    """Compute the space_id from tensors and a configuration, in the same way as `export_module`."""
    tensors = {"weight": space_models.fill("weight", 4, 4), "half": torch.tensor([0.5, -2.0], dtype=torch.bfloat16)}
    configuration = {"heads": 2, "scale": 0.1, "names": ["é", None, True], "eps": 1e-12, "theta": 10000.0}
    manifest = manifest_pb2.Manifest(pooling=manifest_pb2.POOLING_MEAN, l2_normalize=True)
    manifest.encoder.max_sequence_tokens = 24
    manifest.graph.precision = "float32"
    assert space_id(manifest, digest_model(tensors, configuration), (), tmp_path) == TENSORS_AND_CONFIGURATION


def test_another_program_can_compute_an_id(tmp_path: Path) -> None:
    """Compute the space_id of the model "dense" without encserve, and expect the same id.

    The code of this test follows docs/reference/space-id.md and reads only the files of the model.
    """
    folder = space_models.write_dense(tmp_path)

    def digest(facts: Any) -> str:
        return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def tensors(path: Path) -> dict[str, Any]:
        return {
            name: [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
            for name, array in load_file(path).items()
        }

    configuration = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for name in ("version", "truncation", "padding", "decoder"):
        del tokenizer[name]
    facts = {
        "model": digest({"configuration": configuration, "tensors": tensors(folder / "model.safetensors")}),
        "max_sequence_tokens": 32,
        "settings": {
            "pooling": "POOLING_MEAN",
            "l2_normalize": True,
            "prompts": {"query": "query : "},
            "default_prompt_name": "query",
            "text": {},
            "query": {"prompt_name": "query"},
            "document": {},
        },
        "modules": [
            ["Dense", {"activation_function": "ReLU"}, tensors(folder / "2_Dense" / "model.safetensors")],
            ["LayerNorm", {}, tensors(folder / "3_LayerNorm" / "model.safetensors")],
        ],
        "tokenizers": {"text": digest(tokenizer)},
        "quantized": None,
    }
    assert f"s3-{digest(facts)[:32]}" == DIRECTORIES["dense"][2]


@pytest.mark.system
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_supported_versions_of_libraries_give_the_same_ids(which: str, tmp_path: Path) -> None:
    """Run the tests of this file with other versions of sentence-transformers and transformers.

    The other versions are installed into a folder. All other packages keep their versions.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    supported = {it.name: it.specifier for it in map(Requirement, extras["export"])}
    wanted = [f"{name}{supported[name]}" for name in ("sentence-transformers", "transformers")]
    if which == "oldest":
        wanted = [re.sub(r"^([a-z-]+).*>=([0-9.]+).*", r"\1==\2", it) for it in wanted]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    subprocess.run([*pip, *wanted], check=True)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "not system"]
    done = subprocess.run(
        tests, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
