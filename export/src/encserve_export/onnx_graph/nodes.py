"""Finds all nodes and tensors of an ONNX model.

Nodes and tensors may also be in branches (graphs inside a node, such as If) and in functions.
"""

from collections.abc import Iterable, Iterator

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto


def all_nodes(model: onnx.ModelProto) -> Iterator[NodeProto]:
    """Yield all nodes of a model: in the graph, in branches, and in functions."""
    yield from walk(model.graph.node)
    for function in model.functions:
        yield from walk(function.node)


def all_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield all stored tensors of a model: initializers, and attributes of nodes and functions."""
    yield from _initializers(model.graph)
    for node in all_nodes(model):
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)
    for function in model.functions:
        for attribute in function.attribute_proto:
            yield from _attribute_tensors(attribute)


def constants(node: NodeProto) -> dict[str, TensorProto]:
    """Return {output name: tensor} for a Constant node, and an empty dict for any other node."""
    values = [it.t for it in node.attribute if it.name == "value" and node.op_type == "Constant"]
    return dict(zip(node.output, values, strict=False))


def walk(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield the given nodes. Each node is followed by the nodes in its branches."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in _graphs(attribute):
                yield from walk(inner.node)


def _graphs(attribute: AttributeProto) -> list[GraphProto]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def _initializers(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


def _attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in [
        *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
        *attribute.sparse_tensors,
    ]:
        yield from (sparse.values, sparse.indices)
    for inner in _graphs(attribute):
        yield from _initializers(inner)


def type_name(data_type: int) -> str:
    """Return NumPy's name of a tensor type, such as "float32". For an unknown type number 99, return "type 99"."""
    try:
        name = TensorProto.DataType.Name(data_type).lower()
    except ValueError:
        return f"type {data_type}"
    return {"float": "float32", "double": "float64"}.get(name, name)
