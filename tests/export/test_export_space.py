"""The space_id identifies the vectors of a model.

The space_id must be the same for every file format of one model. If a change of the model changes the vectors, the
space_id must change too.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from architectures import add_onnx_file
from google.protobuf.message import Message
from onnx import TensorProto, helper, numpy_helper
from onnx_files import build, node_of, tensor_of
from safetensors.torch import load_file, save_file
from sentence_models import LONGEST, write_model

from encserve_export import EncoderConfig, Target, export_hf, export_init
from encserve_export.bundle.space import MANIFEST_IGNORED, MESSAGE_IGNORED, digest_model, digest_onnx, space_id
from encserve_export.core.errors import ConfigError
from encserve_export.kinds.spec import ModuleFacts
from encserve_export.onnx_graph.interface import Interface
from encserve_proto.bundle.v1 import manifest_pb2
from encserve_proto.fingerprint import fingerprint

MODULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Pooling", {"pooling_mode": "mean"}),
    ("Dense", {"in_features": 24, "out_features": 16}),
    ("Normalize", {}),
)
SETTINGS = {"prompts": {"query": "Query: ", "passage": ""}, "default_prompt_name": "query"}
INTERFACE = Interface("input_ids", "attention_mask", "", "rows")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("original") / "model", MODULES, settings=SETTINGS)


@pytest.fixture(scope="module")
def original_space(original: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return space_of(original, tmp_path_factory.mktemp("models"))


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """Copy the original directory. A test may change the copy."""
    return shutil.copytree(original, tmp_path / "model")


def space_of(directory: Path, folder: Path, **options: Any) -> str:
    target = Target(model_repository=folder / "models", name="m", overwrite=True)
    manifest = export_hf(directory, target, **options).manifest
    assert re.fullmatch("s3-[0-9a-f]{32}", manifest.space_id)
    return manifest.space_id


def change_json(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed, indent=7))


def save_in_shards(directory: Path) -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    tensors = load_file(directory / "model.safetensors")
    tensors["embeddings.position_ids"] = torch.arange(LONGEST)[None]
    (directory / "model.safetensors").unlink()
    files = {name: shards[i % 2] for i, name in enumerate(sorted(tensors))}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if files[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_the_format_of_the_files_does_not_change_the_id(directory: Path, tmp_path: Path, original_space: str) -> None:
    save_in_shards(directory)
    change_json(
        directory / "config.json", transformers_version="4.1.0", torch_dtype="float32", _name_or_path="/home/x",
        architectures=["BertForMaskedLM"], attention_probs_dropout_prob=0.5, use_cache=False,
    )  # fmt: skip
    truncation = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    change_json(directory / "tokenizer.json", padding=None, truncation=truncation)
    change_json(directory / "config_sentence_transformers.json", similarity_fn_name="dot")
    assert space_of(directory, tmp_path, precision="float16") == original_space


@pytest.mark.system
def test_the_route_does_not_change_the_id(directory: Path, tmp_path: Path, original_space: str) -> None:
    assert space_of(directory, tmp_path, via="transformers") == original_space
    add_onnx_file(directory, tmp_path / "models" / "m" / "1")
    assert space_of(directory, tmp_path, via="onnx") == original_space
    (directory / "model.safetensors").unlink()
    (directory / "modules.json").unlink()
    assert space_of(directory, tmp_path, via="onnx") != original_space


def change_head(directory: Path) -> None:
    path = directory / "2_Dense" / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    tensors["linear.bias"][-1] += 1e-3
    torch.save(tensors, path)


def reorder_modules(directory: Path) -> None:
    path = directory / "modules.json"
    modules = json.loads(path.read_text())
    path.write_text(json.dumps([*modules[:2], modules[3], modules[2]]))


OTHER: dict[str, Callable[[Path], None]] = {
    "a weight of the head": change_head,
    "the activation of the head": lambda it: change_json(
        it / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.ReLU"
    ),
    "the order of the modules": reorder_modules,
    "the tokenizer": lambda it: change_json(it / "tokenizer.json", normalizer={"type": "Lowercase"}),
    "a prompt": lambda it: change_json(it / "config_sentence_transformers.json", prompts={"query": "query: "}),
}


@pytest.mark.system
@pytest.mark.parametrize("what", OTHER)
def test_a_change_of_the_directory_changes_the_id(
    directory: Path, tmp_path: Path, original_space: str, what: str
) -> None:
    OTHER[what](directory)
    assert space_of(directory, tmp_path) != original_space


def set_field(message: Message, name: str) -> None:
    """Set a field of a message to a value that differs from the field's default."""
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if name == "prompts":
        value["query"] = "Query: "
    elif field.message_type is not None:
        value.SetInParent()
    elif field.is_repeated:
        value.append(7)
    else:
        setattr(message, name, {field.CPPTYPE_STRING: "a", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 1))


def test_a_field_of_the_manifest_changes_the_id_unless_it_is_ignored(tmp_path: Path) -> None:
    """Set each field of the manifest that is not in the list of ignored fields. Expect another space_id each time.

    So a field that is added to the manifest later also changes the space_id.
    """
    plain = manifest_pb2.Manifest()
    spaces = {space_id(plain, "", (), tmp_path)}
    for name in set(manifest_pb2.Manifest.DESCRIPTOR.fields_by_name) - MANIFEST_IGNORED:
        changed = manifest_pb2.Manifest()
        set_field(changed, name)
        spaces.add(space_id(changed, "", (), tmp_path))
    assert len(spaces) == len(manifest_pb2.Manifest.DESCRIPTOR.fields) - len(MANIFEST_IGNORED) + 1
    for inner in ("text", "query", "document", "multi_vector", "sparse"):
        names = set(getattr(plain, inner).DESCRIPTOR.fields_by_name) - MESSAGE_IGNORED
        for name in names:
            changed = manifest_pb2.Manifest()
            set_field(getattr(changed, inner), name)
            spaces.add(space_id(changed, "", (), tmp_path))
        assert names


def test_names_and_texts_of_prompts_change_the_id_unless_empty(tmp_path: Path) -> None:
    def of(**prompts: str) -> str:
        return space_id(manifest_pb2.Manifest(prompts=prompts), "", (), tmp_path)

    assert of(query="q: ", passage="") == of(query="q: ")
    assert len({of(), of(query="q: "), of(query="Q: "), of(passage="q: "), of(name="q: ")}) == 5


def test_int8_changes_the_id_but_float16_does_not(tmp_path: Path) -> None:
    def of(precision: str) -> str:
        return space_id(manifest_pb2.Manifest(graph=manifest_pb2.Graph(precision=precision)), "", (), tmp_path)

    assert of("float32") == of("float16") == of("bfloat16")
    assert len({of("float32"), of("int8"), of("int4")}) == 3


def test_the_order_of_modules_changes_the_id(tmp_path: Path) -> None:
    dense = ModuleFacts("Dense", {}, {"linear.weight": torch.ones(2, 2)})
    relu = ModuleFacts("Dense", {"activation_function": "ReLU"}, {"linear.weight": torch.ones(2, 2)})
    other = ModuleFacts("Dense", {}, {"linear.weight": torch.zeros(2, 2)})
    normalize = ModuleFacts("Normalize", {}, {})
    lists = [(), (dense,), (relu,), (other,), (dense, normalize), (normalize, dense)]
    assert len({space_id(manifest_pb2.Manifest(), "", it, tmp_path) for it in lists}) == len(lists)


def tokenizer_space(folder: Path, **fields: Any) -> str:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "normalizer": None, "version": "1.0"} | fields))
    text = manifest_pb2.TextInput(tokenizer_file="tokenizer.json")
    return space_id(manifest_pb2.Manifest(text=text), "", (), folder)


def test_a_tokenizer_changes_the_id_but_its_padding_does_not(tmp_path: Path) -> None:
    plain = tokenizer_space(tmp_path)
    older = {"type": "BPE", "vocab": {"ab": 2, "a": 0, "b": 1}, "merges": ["a b"]}
    assert tokenizer_space(tmp_path, model=older, padding={"pad_id": 0}, truncation=None, version="1.1") == plain
    assert tokenizer_space(tmp_path, decoder={"type": "ByteLevel"}) == plain
    others: list[dict[str, Any]] = [
        {"normalizer": {"type": "NFC"}},
        {"model": older | {"merges": []}},
        {"model": older | {"vocab": {"a": 1, "b": 0, "ab": 2}}},
        {"added_tokens": [{"id": 0, "content": "a", "special": True}]},
    ]
    assert len({plain, *(tokenizer_space(tmp_path, **it) for it in others)}) == 5


def test_an_unknown_setting_changes_the_id_but_a_training_setting_does_not() -> None:
    plain = digest_model({}, {"a": 1})
    assert digest_model({}, {"a": 1, "b": None}) != plain
    assert digest_model({}, {"a": 1, "hidden_dropout_prob": 0.1, "classifier_dropout": None}) == plain
    nested = {"a": 1, "text_config": {"torch_dtype": "float32", "b": 1}}
    assert digest_model({}, nested) == digest_model({}, {"a": 1, "text_config": {"b": 1}}) != plain


def test_equal_numbers_of_other_types_give_the_same_id() -> None:
    plain = digest_model({}, {"a": 1, "b": [10000.0, "1", None, True, 0.1]})
    assert digest_model({}, {"b": (1e4, "1", None, True, 0.1), "a": 1.0}) == plain
    others = [[10000.5, "1", None, True, 0.1], [1e4, 1, None, True, 0.1], [1e4, "1", None, 1, 0.1]]
    assert len({plain, *(digest_model({}, {"a": 1, "b": it}) for it in others)}) == 4


@pytest.mark.parametrize("configuration", [{"dtype_of": torch.float32}, {"a": {(1, 2): 2}}, {"a": [{1, 2}]}])
def test_a_configuration_that_json_cannot_express_is_refused(configuration: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the configuration must hold JSON values only: "):
        digest_model({}, configuration)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_names_types_shapes_and_values_of_tensors_change_the_id(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    tensors = [tensor, tensor.reshape(3, 2), tensor[:, :2], tensor[0, 0], tensor[:0], tensor.flip(0)]
    others = [{"x": it} for it in (*tensors, tensor.to(torch.float16))]
    assert len({digest_model(it, {}) for it in (*others, {"y": tensor})}) == 8
    transposed = tensor.T.contiguous().T
    assert not transposed.is_contiguous()
    assert digest_model({"x": transposed}, {}) == digest_model({"x": tensor}, {})


def test_the_usual_position_ids_of_older_versions_do_not_change_the_id() -> None:
    plain = digest_model({"a": torch.ones(2)}, {})

    def of(name: str, values: torch.Tensor) -> str:
        return digest_model({"a": torch.ones(2), name: values}, {})

    assert of("embeddings.position_ids", torch.arange(5)[None]) == plain
    assert of("embeddings.token_type_ids", torch.zeros(1, 5, dtype=torch.int64)) == plain
    assert of("embeddings.position_ids", torch.arange(5)[None] + 1) != plain
    assert of("embeddings.token_type_ids", torch.ones(1, 5, dtype=torch.int64)) != plain
    assert of("rotary.inv_freq", torch.tensor([1.0, 0.1])) != of("rotary.inv_freq", torch.tensor([1.0, 0.2]))


def onnx_space(model: onnx.ModelProto) -> str:
    return digest_onnx(model, INTERFACE)


def test_names_and_order_in_an_onnx_file_do_not_change_the_id() -> None:
    plain, renamed = build(), build()
    for node in renamed.graph.node:
        node.name, node.doc_string = f"{node.name} renamed", "line 7"
        node.input[:] = [it if it in ("input_ids", "attention_mask") else f"{it}_2" for it in node.input]
        node.output[:] = [it if it == "rows" else f"{it}_2" for it in node.output]
    for tensor in renamed.graph.initializer:
        tensor.name += "_2"
    count = node_of(renamed, "count renamed")
    renamed.graph.node.insert(7, count)
    renamed.graph.node.remove(renamed.graph.node[10])
    renamed.graph.node.append(helper.make_node("Identity", ["rows"], ["unused"]))
    onnx.checker.check_model(renamed)
    assert onnx_space(renamed) == onnx_space(plain)


def test_the_data_field_of_an_onnx_tensor_does_not_change_the_id() -> None:
    listed, table = build(), numpy_helper.to_array(tensor_of(build(), "table"))
    tensor_of(listed, "table").ClearField("raw_data")
    tensor_of(listed, "table").float_data.extend(table.ravel().tolist())
    assert onnx_space(listed) == onnx_space(build())


def test_weights_operators_attributes_and_opsets_of_an_onnx_file_change_the_id() -> None:
    weight, operator, attribute = build(), build(), build()
    table = numpy_helper.to_array(tensor_of(weight, "table"))
    tensor_of(weight, "table").CopyFrom(numpy_helper.from_array(table + np.float32(1e-3), "table"))
    node_of(operator, "rows").op_type = "Sub"
    node_of(attribute, "real").attribute[0].i = TensorProto.DOUBLE
    models = [build(), weight, operator, attribute, build(opset=18)]
    assert len({onnx_space(it) for it in models}) == len(models)


def branching(add: float = 1.0, names: str = "", *, swapped: bool = False) -> onnx.ModelProto:
    """Return a graph with a condition. If the condition is true, rows = ids + add. Otherwise rows = ids - add."""

    def branch(operator: str) -> onnx.GraphProto:
        made, constant = f"made{names}", f"constant{names}"
        number = numpy_helper.from_array(np.array(add, np.float32), constant)
        node = helper.make_node(operator, ["real", constant], [made], name=f"node{names}")
        output = helper.make_tensor_value_info(made, TensorProto.FLOAT, ["n"])
        return helper.make_graph([node], f"branch{names}", [], [output], [number])

    operators = ("Sub", "Add") if swapped else ("Add", "Sub")
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["condition"], to=TensorProto.BOOL),
        helper.make_node(
            "If", ["condition"], ["rows"], then_branch=branch(operators[0]), else_branch=branch(operators[1])
        ),
    ]
    inputs = [helper.make_tensor_value_info(INTERFACE.input_ids, TensorProto.INT64, ["n"])]
    inputs.append(helper.make_tensor_value_info(INTERFACE.attention_mask, TensorProto.INT64, [1]))
    output = helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph(nodes, "g", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_branches_change_the_id_but_names_in_branches_do_not() -> None:
    for model in (branching(), branching(names="_2")):
        onnx.checker.check_model(model, full_check=True)
    assert onnx_space(branching(names="_2")) == onnx_space(branching())
    assert len({onnx_space(it) for it in (branching(), branching(2.0), branching(swapped=True))}) == 3


def splitting(outputs: int) -> onnx.ModelProto:
    """Return a graph that splits the ids into `outputs` equal parts. The rows are the first part."""
    nodes = [helper.make_node("Split", ["input_ids"], ["rows", *(f"rest_{i}" for i in range(1, outputs))])]
    ids = helper.make_tensor_value_info(INTERFACE.input_ids, TensorProto.INT64, ["n"])
    mask = helper.make_tensor_value_info(INTERFACE.attention_mask, TensorProto.INT64, ["n"])
    output = helper.make_tensor_value_info("rows", TensorProto.INT64, ["m"])
    graph = helper.make_graph(nodes, "g", [ids, mask], [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9)


def test_the_number_of_outputs_of_an_operator_changes_the_id() -> None:
    for outputs in (2, 3):
        onnx.checker.check_model(splitting(outputs))
    assert onnx_space(splitting(2)) != onnx_space(splitting(3))


def looping(added: str) -> onnx.ModelProto:
    """Return a graph with two nested loops. Each inner step adds a loop counter to a sum, and the rows are the sum.

    `added` names the counter: "inner" or "outer".
    """
    scalar: list[int] = []

    def body(counter: str, total: str, nodes: list[onnx.NodeProto], made: str) -> onnx.GraphProto:
        keep = helper.make_node("Identity", [f"go_{counter}"], [f"going_{counter}"])
        ports = [(counter, TensorProto.INT64), (f"go_{counter}", TensorProto.BOOL), (total, TensorProto.INT64)]
        inputs = [helper.make_tensor_value_info(name, kind, scalar) for name, kind in ports]
        ends = [(f"going_{counter}", TensorProto.BOOL), (made, TensorProto.INT64)]
        outputs = [helper.make_tensor_value_info(name, kind, scalar) for name, kind in ends]
        return helper.make_graph([keep, *nodes], counter, inputs, outputs)

    add = helper.make_node("Add", ["inner_total", added], ["inner_made"])
    inner = body("inner", "inner_total", [add], "inner_made")
    loop = helper.make_node("Loop", ["times", "", "outer_total"], ["outer_made"], body=inner)
    outer = body("outer", "outer_total", [loop], "outer_made")
    nodes = [
        helper.make_node("ReduceSum", ["input_ids"], ["times"], keepdims=0),
        helper.make_node("ReduceSum", ["attention_mask"], ["start"], keepdims=0),
        helper.make_node("Loop", ["times", "", "start"], ["rows"], body=outer),
    ]
    ports = [helper.make_tensor_value_info(it, TensorProto.INT64, ["n"]) for it in ("input_ids", "attention_mask")]
    graph = helper.make_graph(nodes, "g", ports, [helper.make_tensor_value_info("rows", TensorProto.INT64, scalar)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_the_inputs_of_nested_branches_change_the_id() -> None:
    for counter in ("inner", "outer"):
        onnx.checker.check_model(looping(counter), full_check=True)
    assert onnx_space(looping("inner")) != onnx_space(looping("outer"))


def calling(inputs: tuple[str, str] = ("a", "b"), output: str = "c", alpha: float = 1.0, opset: int = 17) -> Any:
    """Return a graph that computes rows = f(ids, mask). By default, f(a, b) = a - b."""
    function = helper.make_function(
        "mine",
        "f",
        list(inputs),
        [output],
        [
            helper.make_node("Sub", ["a", "b"], ["c"]),
            helper.make_node("Neg", ["c"], ["d"]),
            helper.make_node("Elu", ["c"], ["e"], alpha=alpha),
        ],
        [helper.make_opsetid("", opset)],
    )
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("f", ["x", "y"], ["rows"], domain="mine"),
    ]
    ports = [helper.make_tensor_value_info(it, TensorProto.INT64, ["n"]) for it in ("input_ids", "attention_mask")]
    graph = helper.make_graph(nodes, "g", ports, [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n"])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=9)


def test_inputs_outputs_attributes_and_opsets_of_functions_change_the_id() -> None:
    """Change the function of a graph in several ways, and expect another space_id each time.

    For example, exchanged inputs change the sign of the result.
    """
    models = [
        calling(),
        calling(inputs=("b", "a")),
        calling(output="d"),
        calling(alpha=2.0),
        calling(opset=16),
    ]
    for model in models:
        onnx.checker.check_model(model)
    assert len({onnx_space(it) for it in models}) == len(models)


def test_a_given_id_is_written(tiny: EncoderConfig, tmp_path: Path) -> None:
    """Export with a given space_id, and expect this id in the manifest. Ids in older bundles begin with s2-."""
    given = f"s2-{'5' * 32}"
    computed = export_init(tiny, 1, Target(model_repository=tmp_path, name="m"))
    assert computed.replaced_space_id == ""
    kept = export_init(tiny, 1, Target(model_repository=tmp_path, name="m", overwrite=True, keep_space_id=given))
    assert (kept.manifest.space_id, kept.replaced_space_id) == (given, computed.manifest.space_id)
    assert kept.manifest.fingerprint == fingerprint(kept.manifest) != computed.manifest.fingerprint
    for other in (f"s3-{'5' * 32}", "0123456789abcdef" * 2):  # the second is an id of the oldest bundles
        assert Target(model_repository=tmp_path, name="m", keep_space_id=other).keep_space_id == other


@pytest.mark.parametrize("given", ["5" * 31, f"s2-{'5' * 33}", f"s4-{'5' * 32}", "A" * 32, f"{'5' * 32}\n"])
def test_a_text_that_is_not_an_id_is_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a space_id is s3- and 32 hex digits; in older bundles the prefix is s2-"):
        Target(model_repository=tmp_path, name="m", keep_space_id=given)


def test_random_weights_change_the_id(tiny: EncoderConfig, tmp_path: Path) -> None:
    ids = {
        export_init(tiny, seed, Target(model_repository=tmp_path, name=f"{seed}")).manifest.space_id for seed in (1, 2)
    }
    assert len(ids) == 2
