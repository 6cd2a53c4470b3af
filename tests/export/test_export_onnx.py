"""These tests export ONNX files, and check the manifest, the hidden states and the errors."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from google.protobuf import json_format
from onnx import TensorProto, helper, numpy_helper
from onnx_files import (
    D_MODEL,
    FLOAT,
    POSITIONS,
    VOCAB_SIZE,
    build,
    expected_rows_with_types,
    export_torch,
    node_of,
    random_table,
    save,
    save_with_data,
    tensor_of,
    value,
)

from encserve_export import EncoderConfig, OnnxOptions, Target, export_onnx
from encserve_export.cli import main
from encserve_export.core.errors import (
    BundleExistsError,
    ConfigError,
    TokenizerError,
    UnsupportedModelError,
    VocabularyError,
)
from encserve_export.core.precision import Precision
from encserve_export.onnx_graph import external
from encserve_export.onnx_graph.interface import Names, embedding_rows, precision_of
from encserve_export.onnx_graph.nodes import all_tensors
from encserve_export.onnx_graph.run import OnnxEncoder
from encserve_export.source.tokenizer import read_tokenizer
from encserve_proto.bundle.v1 import manifest_pb2

SHORT = OnnxOptions(max_sequence_tokens=16)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rows_of(path: Path, feeds: dict[str, Any], output: str) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run([output], feeds)[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    folder.mkdir()
    return folder / "encoder.onnx"


@pytest.fixture
def target(models: Path) -> Target:
    return Target(model_repository=models, name="mine")


def test_the_manifest_describes_the_model(file: Path, target: Target) -> None:
    manifest = export_onnx(save(build(with_types=True), file), target, SHORT).manifest
    assert manifest.encoder == manifest_pb2.EncoderShape(d_model=D_MODEL, vocab_size=VOCAB_SIZE, max_sequence_tokens=16)
    assert manifest.graph == manifest_pb2.Graph(
        file="model.onnx",
        opset=17,
        input_ids_name="input_ids",
        attention_mask_name="attention_mask",
        token_type_ids_name="token_type_ids",
        output_name="rows",
        precision="float32",
    )
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (manifest.source.kind, manifest.source.description) == ("onnx", "by hand 7")
    assert manifest.source.weights_sha256 == sha256
    assert set(manifest.source.versions) == {"encserve", "onnx", "onnxruntime", "tokenizers"}
    assert [(part.part, part.count) for part in manifest.parameters] == [
        ("other", (VOCAB_SIZE + POSITIONS + 2) * D_MODEL)
    ]
    assert [(its.path, its.sha256) for its in manifest.files] == [("model.onnx", sha256)], "byte for byte"
    parity = manifest.parity
    assert (parity.tolerance, parity.max_relative_error) == (0, 0)
    assert 0 < parity.max_padding_error <= 1e-5
    assert {tuple(case.lengths) for case in parity.cases} >= {(1,), (16,), (16, 8, 1)}
    assert not manifest.HasField("text")


def test_each_token_has_the_type_0(tmp_path: Path) -> None:
    model, ids = build(with_types=True), np.array([[3, 4, 5]])
    graph = manifest_pb2.Graph(
        input_ids_name="input_ids",
        attention_mask_name="attention_mask",
        token_type_ids_name="token_type_ids",
        output_name="rows",
    )
    (rows,) = OnnxEncoder(save(model, tmp_path / "typed.onnx"), graph)(ids, np.ones_like(ids))
    np.testing.assert_allclose(rows, expected_rows_with_types(model, ids[0]), rtol=1e-5, atol=1e-6)


def test_the_command(file: Path, models: Path, tiny: EncoderConfig, write_tokenizer: Callable[..., Path]) -> None:
    """Use the command to export an ONNX file that PyTorch wrote. Check the report and the bundle.

    The inputs and outputs of this file do not have our default names. The options include a tokenizer and a pooling.
    """
    export_torch(file, tiny)
    longest = tiny.max_sequence_tokens
    tokenizer = write_tokenizer(file.parent / "words.json", 30)
    names = ("--input-ids-name", "tokens", "--attention-mask-name", "real", "--token-type-ids-name", "segments")
    more = ("--pooling", "cls", "--l2-normalize", "--tokenizer", tokenizer, "--pad-token-id", 1, "--version", "3")
    given = ("onnx", file, "--model-repository", models, "--name", "m", "--max-sequence-tokens", longest)
    result = run(*given, *names, *more)
    assert result.exit_code == 0, result.output
    text = (models / "m" / "3" / "manifest.json").read_text()
    manifest = json_format.Parse(text, manifest_pb2.Manifest())
    assert (manifest.graph.input_ids_name, manifest.graph.attention_mask_name) == ("tokens", "real")
    assert (manifest.graph.token_type_ids_name, manifest.graph.output_name) == ("segments", "hidden")
    assert (manifest.encoder.d_model, manifest.encoder.vocab_size) == (16, 50)
    assert (manifest.pooling, manifest.l2_normalize) == (manifest_pb2.POOLING_CLS, True)
    assert list(manifest.text.special_token_ids) == [1, 2, 3]
    assert manifest.source.description.startswith("pytorch 2.")
    assert sorted(its.path for its in manifest.files) == ["model.onnx", "tokenizer.json"]
    for shown in (
        "not compared with PyTorch: the model came as ONNX",
        "MiB, float32, opset 17",
        "padding      max error",
        "batches, lengths 1 to 24",
        manifest.fingerprint,
        str(models / "m" / "3"),
    ):
        assert shown in result.stdout
    assert "the hidden states are the output hidden; there are 50 token ids" in result.stderr


def test_the_same_file_gives_the_same_bytes(file: Path, tmp_path: Path) -> None:
    save_with_data(build(), file)
    paths = [export_onnx(file, Target(model_repository=tmp_path / at, name="mine"), SHORT).path for at in "ab"]
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in paths]
    assert contents[0] == contents[1]


def test_an_existing_version_is_kept(file: Path, target: Target) -> None:
    export_onnx(save(build(), file), target, SHORT)
    with pytest.raises(BundleExistsError, match="or --overwrite to replace it"):
        export_onnx(file, target, SHORT)
    export_onnx(file, dataclasses.replace(target, overwrite=True), SHORT)


def test_external_data_are_embedded(file: Path, target: Target) -> None:
    model = build()
    given = save_with_data(model, file)
    exported = export_onnx(given, target, SHORT)
    content = given.read_bytes() + (given.parent / "weights.bin").read_bytes()
    assert exported.manifest.source.weights_sha256 == hashlib.sha256(content).hexdigest()
    assert [its.path for its in exported.manifest.files] == ["model.onnx"]
    _same_rows(given, exported.path / "model.onnx")


def test_large_external_data_go_into_one_file(file: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export a model whose tensors are in separate files. The bundle must have one file with all tensors.

    The tensor of a Constant node must be in this file too.
    """
    model = build()
    table = random_table(300)
    del model.graph.initializer[0]
    model.graph.node.insert(0, helper.make_node("Constant", [], ["table"], value=numpy_helper.from_array(table)))
    onnx.save(model, file, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=100,
              convert_attribute=True)  # fmt: skip
    assert len(list(file.parent.iterdir())) == 3, "expected one file for each tensor"
    monkeypatch.setattr(external, "MAX_FILE_BYTES", 1000)
    exported = export_onnx(file, target, SHORT)
    assert sorted(path.name for path in exported.path.iterdir()) == ["manifest.json", "model.onnx", "model.onnx.data"]
    assert [its.path for its in exported.manifest.files] == ["model.onnx", "model.onnx.data"]
    assert exported.manifest.encoder.vocab_size == 300
    written = onnx.load(exported.path / "model.onnx", load_external_data=False)
    locations = {
        entry.value for tensor in all_tensors(written) for entry in tensor.external_data if entry.key == "location"
    }
    assert locations == {"model.onnx.data"}
    assert (exported.path / "model.onnx").stat().st_size < table.nbytes
    _same_rows(file, exported.path / "model.onnx")


def _same_rows(one: Path, other: Path) -> None:
    ids = np.arange(30).reshape(2, 15)  # (batch, seq)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    np.testing.assert_array_equal(rows_of(one, feeds, "rows"), rows_of(other, feeds, "rows"))


def test_last_hidden_state_is_chosen_among_several_outputs(file: Path, target: Target) -> None:
    model = build()
    for name in ("states.0", "last_hidden_state"):
        model.graph.node.append(helper.make_node("Identity", ["rows"], [name]))
        model.graph.output.append(value(name, FLOAT, ["batch", "seq", D_MODEL]))
    save(model, file)
    assert export_onnx(file, target, SHORT).manifest.graph.output_name == "last_hidden_state"
    chosen = OnnxOptions(max_sequence_tokens=16, names=Names(output="states.0"))
    again = Target(model_repository=target.model_repository, name="mine", version="2")
    assert export_onnx(file, again, chosen).manifest.graph.output_name == "states.0"


def test_weights_listed_as_inputs_are_not_inputs(file: Path, target: Target) -> None:
    model = build()
    model.graph.input.append(value("table", FLOAT, [VOCAB_SIZE, D_MODEL]))
    export_onnx(save(model, file), target, SHORT)


def test_a_table_in_a_local_function_is_found(file: Path, target: Target) -> None:
    """Export a file in which a local function reads the embedding table. Expect the right vocab_size."""
    model = build()
    model.graph.node[0].CopyFrom(helper.make_node("Embed", ["table", "input_ids"], ["words"], domain="mine", name="e"))
    body = [helper.make_node("Gather", ["t", "i"], ["o"])]
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("mine", "Embed", ["t", "i"], ["o"], body, imports))
    model.opset_import.append(helper.make_opsetid("mine", 1))
    assert export_onnx(save(model, file), target, SHORT).manifest.encoder.vocab_size == VOCAB_SIZE


def test_operators_of_onnx_runtime_are_accepted(file: Path, target: Target) -> None:
    model = build()
    node_of(model, "words").output[0] = "before"
    model.graph.node.insert(1, helper.make_node("Gelu", ["before"], ["words"], domain="com.microsoft"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert export_onnx(save(model, file), target, SHORT).manifest.graph.opset == 17


def build_with_float16_table() -> onnx.ModelProto:
    model = build()
    half = numpy_helper.from_array(random_table(VOCAB_SIZE).astype(np.float16), "half")
    tensor_of(model, "table").CopyFrom(half)
    model.graph.node.insert(0, helper.make_node("Cast", ["half"], ["table"], to=FLOAT))
    return model


def test_the_manifest_names_float16_weights(file: Path, target: Target) -> None:
    manifest = export_onnx(save(build_with_float16_table(), file), target, SHORT).manifest
    assert manifest.graph.precision == "float16"
    assert manifest.encoder.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_float16_file_keeps_its_precision(file: Path, target: Target, precision: Precision) -> None:
    save(build_with_float16_table(), file)
    message = f"computes in float16 and cannot be converted to {precision}: give --precision float16"
    with pytest.raises(ConfigError, match=message):
        export_onnx(file, target, dataclasses.replace(SHORT, precision=precision))
    assert not target.model_repository.exists()


@pytest.mark.parametrize(("kind", "named"), [(TensorProto.INT8, "int8"), (TensorProto.DOUBLE, "float32")])
def test_the_least_precise_type_is_the_precision(kind: int, named: str) -> None:
    model = build()
    model.graph.initializer.append(helper.make_tensor("more", kind, [2, 2], [1, 2, 3, 4]))
    model.graph.initializer.append(helper.make_tensor("scale", TensorProto.FLOAT16, [1], [1]))
    assert precision_of(model) == named


@pytest.mark.parametrize("how", ["Cast", "Reshape", "none"])
def test_the_table_is_found_after_nodes_that_keep_the_ids(how: str) -> None:
    model = build()
    node_of(model, "words").input[1] = "ids"
    if how == "Cast":
        model.graph.node.insert(0, helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.INT32))
    elif how == "Reshape":
        model.graph.node.insert(0, helper.make_node("Reshape", ["input_ids", "shape"], ["ids"]))
    else:
        model.graph.node.insert(0, helper.make_node("Add", ["input_ids", "one"], ["ids"]))
    assert embedding_rows(model, "input_ids") == (None if how == "none" else VOCAB_SIZE)


def _hide_the_table(model: onnx.ModelProto) -> onnx.ModelProto:
    """Multiply the ids by 1 before the lookup in the embedding table.

    The ids stay the same, but the exporter does not find the table.
    """
    node_of(model, "words").input[1] = "ids"
    model.graph.node.insert(0, helper.make_node("Mul", ["input_ids", "one"], ["ids"], name="hidden"))
    return model


def test_an_unknown_vocabulary_size_is_refused(
    file: Path, target: Target, write_tokenizer: Callable[..., Path]
) -> None:
    save(_hide_the_table(build()), file)
    with pytest.raises(VocabularyError, match=r"number of token ids is not known: .* Give --vocab-size or --tokenizer"):
        export_onnx(file, target, SHORT)
    given = OnnxOptions(max_sequence_tokens=16, vocab_size=VOCAB_SIZE - 1)
    assert export_onnx(file, target, given).manifest.encoder.vocab_size == VOCAB_SIZE - 1
    tokenizer = read_tokenizer(write_tokenizer(file.parent / "words.json", 33))
    again = Target(model_repository=target.model_repository, name="mine", version="2")
    exported = export_onnx(file, again, OnnxOptions(max_sequence_tokens=16, tokenizer=tokenizer))
    assert exported.manifest.encoder.vocab_size == 33


def test_a_vocab_size_above_the_table_is_refused(file: Path, target: Target) -> None:
    """Give a vocab_size larger than the embedding table, and expect an error.

    If the exporter does not find the table, the exporter runs the model with the largest id. This run fails.
    """
    too_many = OnnxOptions(max_sequence_tokens=16, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(VocabularyError, match="must be at most 50, the rows of the embedding table; was 51"):
        export_onnx(save(build(), file), target, too_many)
    with pytest.raises(
        VocabularyError, match=r"vocab_size 51 is too large: .* not with id 50 .*Gather node. Name:'words'"
    ):
        export_onnx(save(_hide_the_table(build()), file), target, too_many)


def test_a_tokenizer_with_too_many_ids_is_refused(
    file: Path, target: Target, write_tokenizer: Callable[..., Path]
) -> None:
    tokenizer = read_tokenizer(write_tokenizer(file.parent / "words.json", 60))
    with pytest.raises(TokenizerError, match="token ids up to 59 .*, but the model's vocab_size is 50"):
        export_onnx(save(build(), file), target, OnnxOptions(max_sequence_tokens=16, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OnnxOptions(max_sequence_tokens=0), "max_sequence_tokens must be at least 1; was 0"),
        (OnnxOptions(pad_token_id=50), "pad_token_id must be from 0 to 49; was 50"),
        (OnnxOptions(pad_token_id=-1), "pad_token_id must be from 0 to 49; was -1"),
    ],
)
def test_options_out_of_range_are_refused(file: Path, target: Target, options: OnnxOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_onnx(save(build(), file), target, options)
    assert not target.model_repository.exists()


def test_int8_skips_a_product_with_a_computed_bias(file: Path, target: Target) -> None:
    model = build(opset=20)
    node_of(model, "rows").output[0] = "plain"
    node = helper.make_node
    model.graph.node.extend(
        [
            node("Reshape", ["plain", "flat"], ["tokens"]),
            node("Add", ["bias", "bias"], ["computed"]),
            node("Gemm", ["tokens", "up", "computed"], ["wide"], name="wide"),
            node("MatMul", ["wide", "down"], ["narrow"], name="narrow"),
            node("Shape", ["plain"], ["plain_shape"]),
            node("Reshape", ["narrow", "plain_shape"], ["rows"]),
        ]
    )
    weights = {"up": random_table(D_MODEL, 3, 128), "down": random_table(128, 4), "bias": random_table(1, 5, 128)[0]}
    weights["flat"] = np.array([-1, D_MODEL])
    model.graph.initializer.extend(numpy_helper.from_array(its, name) for name, its in weights.items())
    exported = export_onnx(save(model, file), target, dataclasses.replace(SHORT, precision="int8"))
    written = {node.op_type for node in onnx.load(exported.path / "model.onnx").graph.node}
    assert {"Gemm", "MatMulIntegerToFloat"} <= written


def test_a_large_file_is_split(file: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export a file larger than MAX_FILE_BYTES. Expect the weights in a separate file, and the same hidden states.

    ONNX Runtime copies weights in the graph's file into memory. Weights in a separate file are memory-mapped.
    """
    monkeypatch.setattr(external, "MAX_FILE_BYTES", 1000)
    exported = export_onnx(save(build(), file), target, SHORT)
    assert [its.path for its in exported.manifest.files] == ["model.onnx", "model.onnx.data"]
    _same_rows(file, exported.path / "model.onnx")


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_large_file_is_converted_like_a_small_one(
    file: Path, target: Target, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    """Convert a model twice: with the weights in the graph's file, and in a separate file. Expect equal weights.

    In float16, ReduceSum stays in float32. "apart" is read only by ReduceSum, and "table" also by a float16 node. The
    third tensor is a constant in a node.
    """
    model = build(opset=20)
    node_of(model, "rows").output[0] = "plain"
    node, listed = helper.make_node, numpy_helper.from_array(random_table(64, 6))
    model.graph.node.extend(
        [
            node("Constant", [], ["listed"], value=listed),
            *(node("ReduceSum", [it, "zero"], [f"{it}_sum"], keepdims=0) for it in ("apart", "table", "listed")),
            node("Sum", [f"{it}_sum" for it in ("apart", "table", "listed")], ["sum"], name="sum"),
            node("MatMul", ["plain", "up"], ["wide"], name="wide"),
            node("MatMul", ["wide", "down"], ["narrow"], name="narrow"),
            node("Add", ["narrow", "sum"], ["rows"], name="last"),
        ]
    )
    weights = {"up": random_table(D_MODEL, 3, 128), "down": random_table(128, 4), "apart": random_table(64, 5)}
    model.graph.initializer.extend(numpy_helper.from_array(its, name) for name, its in weights.items())
    save(model, file)

    def convert(version: str) -> list[tuple[str, int, bytes]]:
        options = dataclasses.replace(SHORT, precision=precision)
        exported = export_onnx(file, dataclasses.replace(target, version=version), options)
        written = onnx.load(exported.path / "model.onnx")
        return [(it.name, it.data_type, numpy_helper.to_array(it).tobytes()) for it in all_tensors(written)]

    small = convert("1")
    monkeypatch.setattr(external, "MAX_FILE_BYTES", 1000)
    assert convert("2") == small
    assert (target.model_repository / "mine/2/model.onnx.data").is_file()
    kinds = {name: kind for name, kind, _ in small}
    assert kinds["apart"] == FLOAT


def test_int8_of_a_graph_without_products_is_refused(file: Path, target: Target) -> None:
    with pytest.raises(UnsupportedModelError, match="no product with a matrix of weights, so int8 would"):
        export_onnx(save(build(opset=20), file), target, OnnxOptions(max_sequence_tokens=16, precision="int8"))
    assert not target.model_repository.exists()
