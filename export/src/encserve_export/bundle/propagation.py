"""What becomes of the signal on its way through a bundle's layers, with and without residual connections."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from encserve_export.bundle.read import ReadBundle
from encserve_export.ground.errors import SequenceError
from encserve_export.ground.runtime import open_session
from encserve_export.source.tokenizer import BundleTokenizer

Input = npt.NDArray[np.int64] | npt.NDArray[np.float32]  # (seq) ids or (seq, d_model) vectors


@dataclasses.dataclass(frozen=True)
class Signal:
    """The tokens' rows after one layer.

    Attributes:
        norm: The Euclidean norm of a row, the mean over the tokens.
        cosine: The cosine similarity of two rows, the mean over all pairs of tokens; 1 where all have become the same,
            NaN for a single token.
    """

    norm: float
    cosine: float


@dataclasses.dataclass(frozen=True)
class Propagation:
    """The signal after each layer: first what enters the first block, then what leaves each.

    Attributes:
        signals: The model as it is.
        without_residuals: The same weights without residual connections; None where the model has none.
    """

    signals: list[Signal]
    without_residuals: list[Signal] | None


def random_input(bundle: ReadBundle, length: int) -> Input:
    """Tokens to look at where nobody gives any: always the same ones.

    Returns:
        (seq) ids, spread over the vocabulary, or (seq, d_model) vectors of standard normal numbers; seq is `length` or
        the model's longest.
    """
    shape = bundle.manifest.encoder
    length = min(length, shape.max_sequence_tokens)
    random = np.random.default_rng(0)
    if bundle.manifest.graph.embeddings_name:
        return random.standard_normal((length, shape.d_model), np.float32)
    return random.integers(0, shape.vocab_size, length)


def read_sequence(bundle: ReadBundle, text: str | None, ids: str | None, length: int) -> Input:
    """The sequence to look at: a text's tokens, ids as "101,2023,102", or `random_input`.

    Raises:
        SequenceError: Both are given, or what is given is no sequence that the model can take.
    """
    shape = bundle.manifest.encoder
    if text is not None and ids is not None:
        raise SequenceError("give --text or --ids, not both")
    if text is None and ids is None:
        return random_input(bundle, length)
    if bundle.manifest.graph.embeddings_name:
        raise SequenceError(f"{bundle.manifest.name} takes embeddings: there is neither text nor ids for it")
    sequence = _read_ids(ids) if text is None else _tokenize(bundle, text)
    if not 1 <= len(sequence) <= shape.max_sequence_tokens:
        raise SequenceError(f"the sequence must have 1 to {shape.max_sequence_tokens} tokens; was {len(sequence)}")
    if not 0 <= min(sequence) <= max(sequence) < shape.vocab_size:
        raise SequenceError(
            f"ids must be from 0 to {shape.vocab_size - 1}; were from {min(sequence)} to {max(sequence)}"
        )
    return np.array(sequence, np.int64)


def _read_ids(text: str | None) -> list[int]:
    try:
        return [int(part) for part in (text or "").split(",")]
    except ValueError as error:
        raise SequenceError(f"--ids must be numbers with commas between them; was {text!r}") from error


def _tokenize(bundle: ReadBundle, text: str) -> list[int]:
    if not bundle.manifest.HasField("text"):
        raise SequenceError(f"{bundle.manifest.name} has no tokenizer; give --ids")
    return BundleTokenizer(bundle.path, bundle.manifest.text).ids(text)


def measure(bundle: ReadBundle, sequence: Input) -> Propagation:
    """Runs a bundle's graph for inspections on one sequence; the bundle must have one.

    Args:
        bundle: The bundle.
        sequence: (seq) ids or (seq, d_model) vectors, at most as long as the model allows.
    """
    inspect = bundle.manifest.inspect_graph
    # The weights stay in their file: only the graph is changed.
    model = onnx.load(bundle.path / inspect.file, load_external_data=False)
    signals = list(_run(bundle, model, sequence))
    if not inspect.residual_nodes:
        return Propagation(signals, None)
    _remove_residuals(model, set(inspect.residual_nodes))
    return Propagation(signals, list(_run(bundle, model, sequence)))


def _remove_residuals(model: onnx.ModelProto, names: set[str]) -> None:
    """Makes x + f(x) just f(x)."""
    for i, node in enumerate(model.graph.node):
        if node.name in names:
            model.graph.node[i].CopyFrom(helper.make_node("Identity", [node.input[1]], list(node.output), node.name))


def _run(bundle: ReadBundle, model: onnx.ModelProto, sequence: Input) -> Iterator[Signal]:
    graph, inspect = bundle.manifest.graph, bundle.manifest.inspect_graph
    session = open_session(model.SerializeToString(), bundle.path)
    feeds = {
        graph.embeddings_name or graph.input_ids_name: sequence[None],
        graph.attention_mask_name: np.ones((1, len(sequence)), np.int64),
    }
    for state in session.run(list(inspect.hidden_state_names), feeds):
        yield _signal(state[0].astype(np.float64))


def _signal(rows: npt.NDArray[np.float64]) -> Signal:
    """What is said of (seq, d_model) rows."""
    norms = np.linalg.norm(rows, axis=1)  # (seq)
    unit = rows / np.maximum(norms, np.finfo(np.float64).tiny)[:, None]  # (seq, d_model)
    n = len(rows)
    # All entries of the matrix of cosines, without its diagonal of ones.
    pairs = float((unit.sum(axis=0) ** 2).sum() - n)
    return Signal(float(norms.mean()), pairs / (n * (n - 1)) if n > 1 else float("nan"))
