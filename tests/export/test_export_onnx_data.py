"""The exporter reads external weights only from the folder of the ONNX file."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from onnx_files import D_MODEL, VOCAB_SIZE, build, point_elsewhere, save_with_data, tensor_of

from encserve_export import OnnxOptions, Target, export_onnx
from encserve_export.core.errors import ExternalDataError
from encserve_export.onnx_graph import external

TABLE_BYTES = VOCAB_SIZE * D_MODEL * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write an encoder and its weight tables in one folder. The tables are in weights.bin."""
    folder = tmp_path / "given"
    folder.mkdir()
    return save_with_data(build(), folder / "encoder.onnx")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Write a file outside the model's folder. The file is long enough for all weights."""
    path = tmp_path / "secret"
    path.write_bytes(bytes(10000))
    return path


def refused(file: Path) -> str:
    models = file.parent.parent / "models"
    with pytest.raises(ExternalDataError) as caught:
        export_onnx(file, Target(model_repository=models, name="mine"), OnnxOptions(max_sequence_tokens=16))
    assert not models.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    "location",
    ["../secret", "../../etc/passwd", "sub/../../secret", "/etc/passwd", "..", "..\\secret", "C:\\secret", "", "a\0b"],
)
def test_paths_outside_the_folder_are_refused(file: Path, secret: Path, location: str) -> None:
    point_elsewhere(file, location=location)
    text = refused(file)
    assert text.startswith(
        f"tensor 'table' has its data in {location!r}; the file must be in the folder of the ONNX file"
    )


def test_an_absolute_path_is_refused(file: Path) -> None:
    point_elsewhere(file, location=str(file.parent / "weights.bin"))
    assert "no absolute path and no '..'" in refused(file)


def test_a_link_to_a_file_outside_is_refused(file: Path, secret: Path) -> None:
    (file.parent / "weights.bin").unlink()
    (file.parent / "weights.bin").symlink_to(secret)
    assert f"'weights.bin', a link to {secret}, outside the folder of the ONNX file. Copy" in refused(file)


def test_a_link_to_a_folder_outside_is_refused(file: Path, secret: Path) -> None:
    (file.parent / "sub").symlink_to(secret.parent)
    point_elsewhere(file, location="sub/secret")
    assert f"a link to {secret}, outside the folder" in refused(file)


def test_links_and_folders_inside_are_accepted(file: Path) -> None:
    (file.parent / "sub").mkdir()
    (file.parent / "weights.bin").rename(file.parent / "sub" / "real.bin")
    (file.parent / "weights.bin").symlink_to("sub/real.bin")
    point_elsewhere(file, location="sub/real.bin")
    exported = export_onnx(
        file, Target(model_repository=file.parent / "models", name="mine"), OnnxOptions(max_sequence_tokens=16)
    )
    assert [its.path for its in exported.manifest.files] == ["model.onnx"]


def in_a_cache(file: Path) -> Path:
    """Move the files into the folder structure of huggingface_hub's cache. Return the new path of the ONNX file.

    In this structure, the files of a model are links into a folder named blobs.
    """
    snapshot = file.parent.parent / "models--somebody--tiny" / "snapshots" / "0123" / "onnx"
    blobs = snapshot.parent.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(file.parent.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../../blobs/{number}")
    return snapshot / file.name


def test_links_of_the_hubs_cache_are_followed(file: Path) -> None:
    cached = in_a_cache(file)
    target = Target(model_repository=file.parent / "models", name="mine")
    assert export_onnx(cached, target, OnnxOptions(max_sequence_tokens=16)).path.is_dir()


@pytest.mark.parametrize("to", ["secret", "models--somebody--tiny/snapshots/secret", "models--else/blobs/secret"])
def test_links_out_of_the_hubs_cache_are_not_followed(file: Path, secret: Path, to: str) -> None:
    cached = in_a_cache(file)
    (secret.parent / to).parent.mkdir(parents=True, exist_ok=True)
    secret.rename(secret.parent / to)
    (cached.parent / "weights.bin").unlink()
    (cached.parent / "weights.bin").symlink_to(secret.parent / to)
    with pytest.raises(ExternalDataError, match="a link to .*outside the folder of the ONNX file"):
        external.take_in(onnx.load(cached, load_external_data=False), cached.parent)


def test_a_blobs_folder_that_is_a_link_is_refused(file: Path, secret: Path) -> None:
    """Replace the cache's folder blobs by a link to another folder, and expect an error.

    An attacker may write such a folder to make the exporter read other files.
    """
    cached = in_a_cache(file)
    blobs = cached.parents[3] / "blobs"
    blobs.rename(secret.parent / "elsewhere")
    blobs.symlink_to(secret.parent / "elsewhere")
    with pytest.raises(ExternalDataError, match="outside the folder of the ONNX file"):
        external.take_in(onnx.load(cached, load_external_data=False), cached.parent)


@pytest.mark.parametrize("location", ["other.bin", "*/_ORT_MEM_ADDR_/*", "weights.bin/more"])
def test_missing_weight_files_are_refused(file: Path, location: str) -> None:
    point_elsewhere(file, location=location)
    text = refused(file)
    assert f"tensor 'table' has its data in {location!r}" in text
    assert "cannot be opened" in text
    assert "put the file next to the ONNX file" in text


def test_a_path_that_is_not_a_regular_file_is_refused(file: Path) -> None:
    (file.parent / "weights.bin").unlink()
    (file.parent / "weights.bin").mkdir()
    assert "weights.bin is not a regular file" in refused(file)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"offset": "-4"}, "tensor 'table' lies at bytes -4 to 1596 of "),
        ({"offset": "1e3"}, "tensor 'table': the offset or length in weights.bin is not a number: "),
        ({"offset": "9" * 40}, "tensor 'table' lies at bytes 999"),
        ({"length": "-1"}, "tensor 'table' has length -1 in weights.bin; its shape (50, 8) of float32 takes "),
        ({"length": "8"}, f"has length 8 in weights.bin; its shape (50, 8) of float32 takes {TABLE_BYTES} bytes"),
        ({"offset": "999999"}, "tensor 'table' lies at bytes 999999 to 1001599 of "),
        ({"offset": "8192"}, "The file is incomplete, or belongs to another model"),
    ],
)
def test_wrong_offsets_and_lengths_are_refused(file: Path, entries: dict[str, str], said: str) -> None:
    point_elsewhere(file, **entries)
    assert said in refused(file)


def test_a_weights_file_that_is_too_short_is_refused(file: Path) -> None:
    content = (file.parent / "weights.bin").read_bytes()
    (file.parent / "weights.bin").write_bytes(content[: TABLE_BYTES - 1])
    assert f"weights.bin, which has {TABLE_BYTES - 1} bytes. The file is incomplete" in refused(file)


@pytest.mark.parametrize(("kind", "dims"), [(TensorProto.STRING, [2]), (TensorProto.FLOAT, [-1, 4]), (99, [2])])
def test_types_and_shapes_that_cannot_be_stored_are_refused(file: Path, kind: int, dims: list[int]) -> None:
    model = onnx.load(file, load_external_data=False)
    table = tensor_of(model, "table")
    table.data_type = kind
    table.dims[:] = dims
    onnx.save(model, file)
    assert "cannot be stored in weights.bin" in refused(file)


@pytest.mark.parametrize("where", ["attribute", "branch", "function", "sparse"])
def test_no_tensor_is_overlooked(tmp_path: Path, where: str) -> None:
    """Put a tensor with a forbidden path into a part of a model, and expect an error. Each case uses another part."""
    model = build()
    tensor = helper.make_tensor("hidden", TensorProto.FLOAT, [1], [0.0])
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    node = helper.make_node("Constant", [], ["c"], value=tensor)
    if where == "attribute":
        model.graph.node.insert(0, node)
    elif where == "branch":
        branch = helper.make_graph([], "branch", [], [], [tensor])
        model.graph.node.append(helper.make_node("If", ["c"], ["d"], then_branch=branch))
    elif where == "function":
        model.functions.append(helper.make_function("f", "F", [], ["c"], [node], [helper.make_opsetid("", 17)]))
    else:
        model.graph.sparse_initializer.add().values.CopyFrom(tensor)
    with pytest.raises(ExternalDataError, match="has its data in '/etc/passwd'; the file must be in the folder"):
        external.take_in(model, tmp_path)
