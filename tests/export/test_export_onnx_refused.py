"""The export refuses an ONNX file that the server cannot serve. The error names the fault and a remedy."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_files import D_MODEL, FLOAT, INT64, build, node_of, random_table, save, tensor_of, value

from encserve_export import OnnxOptions, Target, export_onnx
from encserve_export.core.errors import (
    OnnxFileError,
    OnnxInterfaceError,
    OnnxModelError,
    OnnxRunError,
    ParityError,
)
from encserve_export.onnx_graph.interface import Names

Change = Callable[[onnx.ModelProto], Any]
FLOAT16 = TensorProto.FLOAT16
ROWS = ("batch", "seq", D_MODEL)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Return a function that changes a model, exports the model, and returns the text of the error.

    The function also checks that the export leaves no files.
    """

    def refuse(change: Change, error: type[Exception], options: OnnxOptions | None = None) -> str:
        model = build()
        change(model)
        models = tmp_path / "models"
        with pytest.raises(error) as caught:
            export_onnx(
                save(model, tmp_path / "encoder.onnx"),
                Target(model_repository=models, name="mine"),
                options or OnnxOptions(max_sequence_tokens=16),
            )
        assert not models.exists()
        text = str(caught.value)
        assert "\n" not in text
        assert str(models) not in text, "the error names a folder that the failed export has removed"
        return text

    return refuse


def set_input(name: str, kind: int = INT64, axes: Any = ("batch", "seq")) -> Change:
    """Return a change that adds an input, or replaces the input with the same name."""

    def change(model: onnx.ModelProto) -> None:
        kept = [port for port in model.graph.input if port.name != name]
        del model.graph.input[:]
        model.graph.input.extend([*kept, value(name, kind, axes)])

    return change


def set_outputs(*ports: Any) -> Change:
    """Return a change that replaces the outputs.

    If no node computes an output, a Cast node computes the output from "rows".
    """

    def change(model: onnx.ModelProto) -> None:
        del model.graph.output[:]
        model.graph.output.extend(ports)
        given = {name for node in model.graph.node for name in node.output}
        model.graph.node.extend(
            helper.make_node("Cast", ["rows"], [port.name], to=port.type.tensor_type.elem_type)
            for port in ports
            if port.name not in given
        )

    return change


def rename_input(old: str, new: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        next(port for port in model.graph.input if port.name == old).name = new

    return change


def all_fixed(model: onnx.ModelProto) -> None:
    for name in ("input_ids", "attention_mask"):
        set_input(name, axes=(1, 128))(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            rename_input("input_ids", "tokens"),
            "the model has no input input_ids; the model's inputs are tokens int64 (batch, seq), attention_mask int64 "
            "(batch, seq). Name the right input with --input-ids-name",
        ),
        (
            lambda model: model.graph.input.pop(),
            "the model has no input attention_mask; the model's inputs are input_ids int64 (batch, seq). Name the "
            "right input with --attention-mask-name",
        ),
        (
            set_input("position_ids"),
            "the model has inputs that a server does not fill: position_ids int64 (batch, seq). A server gives "
            "input_ids, attention_mask and zeros for token_type_ids. Wrap the model in a module",
        ),
        (
            set_input("input_ids", TensorProto.INT32),
            "the input input_ids int32 (batch, seq) must be int64; export the model again with int64 ids",
        ),
        (
            set_input("attention_mask", FLOAT),
            "the input attention_mask float32 (batch, seq) must be int64",
        ),
        (
            set_input("attention_mask", axes=("batch", 1, 1, "seq")),
            "the input attention_mask int64 (batch, 1, 1, seq) has rank 4; it must have 2: (batch, seq)",
        ),
        (set_input("attention_mask", axes=None), "the input attention_mask int64 () has rank 0; it must have 2"),
        (set_outputs(value("rows", FLOAT, None)), "no output is float32 (batch, seq, d_model); its outputs are rows"),
        (
            set_input("input_ids", axes=("batch", 128)),
            "axis 1 (seq) of input_ids is fixed to 128. Batches and lengths vary: export the model again with dynamic "
            'axes, in PyTorch torch.onnx.export(..., dynamic_axes={"input_ids": {0: "batch", 1: "seq"}, '
            '"attention_mask": {0: "batch", 1: "seq"}}, dynamo=False)',
        ),
        (
            all_fixed,
            "axis 0 (batch) of input_ids is fixed to 1; axis 1 (seq) of input_ids is fixed to 128; axis 0 (batch) of "
            "attention_mask is fixed to 1; axis 1 (seq) of attention_mask is fixed to 128. ",
        ),
        (
            set_outputs(value("hidden.0", FLOAT, ROWS), value("rows", FLOAT, ROWS), value("mean", FLOAT, ["batch", 8])),
            "several outputs could be the hidden states: hidden.0 float32 (batch, seq, 8), rows float32 (batch, seq, "
            "8); choose one with --output-name",
        ),
        (
            set_outputs(value("sentence", FLOAT, ["batch", 8])),
            "the model pools: its outputs are sentence float32 (batch, 8), one vector for each sequence. A bundle "
            "needs the hidden states before pooling, (batch, seq, d_model). Export the model without its pooling, and "
            "name the pooling with --pooling",
        ),
        (
            set_outputs(value("logits", INT64, ["batch"])),
            "no output is float32 (batch, seq, d_model); its outputs are logits int64 (batch)",
        ),
        (
            set_outputs(value("half", FLOAT16, ROWS)),
            "the output half float16 (batch, seq, 8) must be float32. Export the model in float32. Or keep the weights "
            "in float16, and end the graph with a Cast to float32 (keep_io_types=True",
        ),
        (
            set_outputs(value("double", TensorProto.DOUBLE, ROWS)),
            "the output double float64 (batch, seq, 8) must be float32; export the model in float32",
        ),
    ],
)
def test_wrong_inputs_and_outputs_are_refused(refused: Callable[..., str], change: Change, said: str) -> None:
    assert said in refused(change, OnnxInterfaceError)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (Names(output="hidden"), "the model has no output hidden; its outputs are rows float32 (batch, seq, 8)"),
        (
            Names(token_type_ids="segments"),
            "the model has no input segments; the model's inputs are input_ids int64 (batch, seq), attention_mask "
            "int64 (batch, seq). Name the right input with --token-type-ids-name",
        ),
        (
            Names(attention_mask="input_ids"),
            "the inputs must have different names; the given names are input_ids, input_ids; the model's",
        ),
    ],
)
def test_unknown_names_are_refused(refused: Callable[..., str], names: Names, said: str) -> None:
    assert said in refused(lambda _: None, OnnxInterfaceError, OnnxOptions(names=names))


def test_a_named_output_of_another_rank_is_refused(refused: Callable[..., str]) -> None:
    def add(model: onnx.ModelProto) -> None:
        model.graph.output.append(value("count", FLOAT, ["batch", 1, 1, 1]))
        model.graph.output.append(value("pooled", FLOAT, ["batch", 8]))

    chosen = OnnxOptions(names=Names(output="count"))
    assert "the output count float32 (batch, 1, 1, 1) has rank 4" in refused(add, OnnxInterfaceError, chosen)
    chosen = OnnxOptions(names=Names(output="pooled"))
    assert "the model pools: the output is pooled float32 (batch, 8)" in refused(add, OnnxInterfaceError, chosen)


def import_domain(model: onnx.ModelProto, domain: str) -> None:
    model.opset_import.append(helper.make_opsetid(domain, 1))


def set_operator(op: str, domain: str = "", *, imported: bool = True) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = node_of(model, "words")
        node.op_type, node.domain = op, domain
        if domain and imported:
            import_domain(model, domain)

    return change


def set_opset(version: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return change


def set_ir(version: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.ir_version = version

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_operator("Lookup"), "No Op registered for Lookup with domain_version of 17 .* Name: words OpType: Lookup"),
        (set_operator("Swish"), "No Op registered for Swish with domain_version of 17 .* Name: words OpType: Swish"),
        (set_operator("Lookup", "com.acme"), r"com\.acme:Lookup.* is not a registered function/op"),
        (set_operator("Lookup", "com.microsoft"), r"com\.microsoft:Lookup.* is not a registered function/op"),
        (set_operator("Lookup", "com.acme", imported=False), r"No opset import for domain 'com\.acme' .* Name: words"),
        (set_opset(99), r"Opset 99 .* till opset \d\d"),
        (set_opset(onnx.defs.onnx_opset_version() + 1), r"Opset \d\d .* till opset \d\d"),
        (set_ir(99), r"ir_version 99 is higher than the checker's \(\d\d\)"),
        (set_ir(int(onnx.IR_VERSION) + 1), "ir_version"),
    ],
)
def test_unknown_operators_and_versions_are_refused(refused: Callable[..., str], change: Change, said: str) -> None:
    text = refused(change, OnnxFileError)
    assert re.search(said, text)
    assert re.search(
        r"The installed versions are onnx .* and ONNX Runtime .*\. If an operator or a version is unknown, export", text
    )


def train_dropout(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    node_of(model, "rows").output[0] = "before"
    model.graph.node.append(helper.make_node("Dropout", ["before", "", "training"], ["rows"], name="drop"))


def train_normalization(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(D_MODEL, np.float32), "ones"))
    node_of(model, "rows").output[0] = "before"
    nodes = [
        helper.make_node("Transpose", ["before"], ["across"], perm=[0, 2, 1]),
        helper.make_node("BatchNormalization", ["across", *["ones"] * 4], ["normal", "m", "v"], training_mode=1),
        helper.make_node("Transpose", ["normal"], ["rows"], perm=[0, 2, 1]),
    ]
    model.graph.node.extend(nodes)


def clear_nodes(model: onnx.ModelProto) -> None:
    del model.graph.node[:]


def clear_graph(model: onnx.ModelProto) -> None:
    model.ClearField("graph")


def clear_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def dangle(model: onnx.ModelProto) -> None:
    node_of(model, "kept").input[0] = "nowhere"


def mismatch(model: onnx.ModelProto) -> None:
    node_of(model, "rows").op_type = "MatMul"
    node_of(model, "rows").input[1] = "matrix"
    model.graph.initializer.append(numpy_helper.from_array(random_table(5), "matrix"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.training_info.add(), "is a training graph: it has training_info; export it for inference"),
        (clear_nodes, "the file is not valid ONNX: Graph output 'rows' is not an output of any node in graph"),
        (clear_graph, "is not an ONNX file: it has no graph"),
        (clear_opset, "the file is not valid ONNX: model with IR version >= 3 must specify opset_import for ONNX"),
        (dangle, "the file is not valid ONNX: Nodes in a graph must be topologically sorted, however input 'nowhere'"),
        (mismatch, "op_type:MatMul, node name: rows): [ShapeInferenceError] Incompatible dimensions"),
    ],
)
def test_invalid_onnx_files_are_refused(refused: Callable[..., str], change: Change, said: str) -> None:
    assert said in refused(change, OnnxFileError)


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08\x09", bytes(1000), b"PK\x03\x04" + bytes(100)])
def test_bytes_that_are_not_a_model_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "encoder.onnx"
    path.write_bytes(content)
    with pytest.raises(OnnxFileError, match=f"{path} is not an ONNX file"):
        export_onnx(path, Target(model_repository=tmp_path / "models", name="mine"))


def test_names_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "encoder.onnx"
    path.write_bytes(build().SerializeToString().replace(b"Unsqueeze", b"Unsqu\xffeze"))
    with pytest.raises(OnnxFileError, match="is not an ONNX file: a name in it is not UTF-8"):
        export_onnx(path, Target(model_repository=tmp_path / "models", name="mine"))


def test_damaged_files_raise_only_export_errors(tmp_path: Path) -> None:
    """Export damaged files. Each export must succeed or raise one of our errors, and no other exception."""
    content = build().SerializeToString()
    path, random = tmp_path / "encoder.onnx", np.random.default_rng(0)
    for at in random.integers(0, len(content), 60):
        bad = bytearray(content)
        bad[at] ^= int(random.integers(1, 256))
        for variant in (content[:at], bytes(bad)):
            path.write_bytes(variant)
            target = Target(model_repository=tmp_path / "models", name="mine", overwrite=True)
            try:
                export_onnx(path, target, OnnxOptions(max_sequence_tokens=4))
            except (OnnxModelError, ParityError):
                continue


# The exporter cannot see the following faults in the graph. It finds these faults when it runs the model.


def shorter_table(model: onnx.ModelProto) -> None:
    """Shorten the position table to 12 rows. The export requests sequences of up to 16 tokens."""
    tensor_of(model, "places").CopyFrom(numpy_helper.from_array(random_table(12, 1), "places"))


def test_a_position_table_that_is_too_short_is_refused(refused: Callable[..., str]) -> None:
    text = refused(shorter_table, OnnxRunError)
    assert text.startswith("the model fails for inputs of shape (1, 16): ")
    assert "running Add node. Name:'placed'" in text
    assert text.endswith("The longest sequence that works has 12 tokens: give --max-sequence-tokens 12 or less")


def test_the_longest_length_that_works_is_exported(tmp_path: Path) -> None:
    model = build()
    shorter_table(model)
    target = Target(model_repository=tmp_path / "models", name="mine")
    export_onnx(save(model, tmp_path / "encoder.onnx"), target, OnnxOptions(max_sequence_tokens=12))


def reshape_rows(model: onnx.ModelProto, shape: list[int]) -> None:
    """Reshape the rows to a constant shape.

    Some other exporters make this mistake: they write the size of an example input into the graph.
    """
    model.graph.initializer.append(numpy_helper.from_array(np.array(shape), "baked"))
    node_of(model, "rows").output[0] = "before"
    model.graph.node.append(helper.make_node("Reshape", ["before", "baked"], ["rows"], name="shaped"))


def overflow(model: onnx.ModelProto) -> None:
    node_of(model, "rows").op_type = "Div"
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, D_MODEL), np.float32), "nothing"))
    node_of(model, "rows").input[1] = "nothing"


def swap_axes(model: onnx.ModelProto) -> None:
    model.graph.output[0].CopyFrom(value("swapped", FLOAT, ["seq", "batch", D_MODEL]))
    model.graph.node.append(helper.make_node("Transpose", ["rows"], ["swapped"], perm=[1, 0, 2]))


def vary_width(model: onnx.ModelProto) -> None:
    model.graph.output[0].CopyFrom(value("wide", FLOAT, ["batch", "seq", "width"]))
    nodes = [
        helper.make_node("Transpose", ["placed"], ["across"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["placed", "across"], ["wide"]),
    ]
    model.graph.node.extend(nodes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: reshape_rows(model, [1, -1, D_MODEL]),
            "the output rows has shape (1, 3, 8) for inputs of shape (3, 1); it must be (3, 1, d_model)",
        ),
        (
            lambda model: reshape_rows(model, [-1, 7, D_MODEL]),
            "The input tensor cannot be reshaped to the requested shape. Input shape:{1,1,8}, requested shape:{-1,7,8}",
        ),
        (overflow, "the output rows has numbers that are not finite for inputs of shape (1, 1)"),
        (swap_axes, "the output swapped has shape (16, 1, 8) for inputs of shape (1, 16); it must be (1, 16, d_model)"),
        (
            vary_width,
            "the output wide has rows of 16 dimensions for inputs of shape (1, 16), but rows of 1 for other inputs",
        ),
    ],
)
def test_faults_that_appear_only_in_a_run_are_refused(refused: Callable[..., str], change: Change, said: str) -> None:
    assert said in refused(change, OnnxRunError)


def test_a_model_that_ignores_its_mask_is_refused(refused: Callable[..., str]) -> None:
    def ignore(model: onnx.ModelProto) -> None:
        node_of(model, "total").input[0] = "placed"

    text = refused(ignore, ParityError)
    message = r"gives other rows for padded sequences in a batch .*: a row has the relative error \S+; at most 1\.0e-05"
    assert re.search(message, text)
    assert "the model ignores its attention mask or a part of the mask" in text


@pytest.mark.parametrize("change", [train_dropout, train_normalization])
def test_a_model_in_training_mode_is_refused(refused: Callable[..., str], change: Change) -> None:
    assert "the model was exported for training (without model.eval())" in refused(change, ParityError)


def test_float16_rounding_that_depends_on_the_batch_is_refused(refused: Callable[..., str]) -> None:
    def ignore_in_float16(model: onnx.ModelProto) -> None:
        node_of(model, "total").input[0] = "placed"
        model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), np.float16), "unused"))

    assert "the model computes in float16, and rounding differs" in refused(ignore_in_float16, ParityError)


def test_lengths_are_tested_without_padding_ids(refused: Callable[..., str]) -> None:
    """Export a model with a short position table, and expect the longest possible length in the error.

    In this model, as in RoBERTa, padding ids have no positions. A sequence of padding ids never reaches the end of the
    position table. So the exporter must test lengths with other ids.
    """

    def count_places(model: onnx.ModelProto) -> None:
        shorter_table(model)
        model.graph.initializer.append(numpy_helper.from_array(np.array(49), "pad"))
        del model.graph.node[1:4]
        nodes = [
            helper.make_node("Equal", ["input_ids", "pad"], ["is_pad"]),
            helper.make_node("Not", ["is_pad"], ["is_word"]),
            helper.make_node("Cast", ["is_word"], ["counted"], to=INT64),
            helper.make_node("CumSum", ["counted", "one"], ["place"]),
            helper.make_node("Gather", ["places", "place"], ["first"], name="first"),
        ]
        for node in reversed(nodes):
            model.graph.node.insert(1, node)

    text = refused(count_places, OnnxRunError, OnnxOptions(max_sequence_tokens=16, pad_token_id=49))
    assert "running Gather node. Name:'first' Status Message: indices element out of data bounds" in text
    assert text.endswith("The longest sequence that works has 11 tokens: give --max-sequence-tokens 11 or less")
