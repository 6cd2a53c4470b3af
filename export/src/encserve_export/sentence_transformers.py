"""Reads what sentence-transformers puts beside a checkpoint: how rows become one vector, and of how long a text."""

import dataclasses
from pathlib import Path

from encserve_export.errors import CheckpointFileError, UnsupportedModelError
from encserve_export.weights import read_json, read_object
from encserve_proto.v1 import manifest_pb2

POOLINGS = {
    "mean": manifest_pb2.POOLING_MEAN,
    "cls": manifest_pb2.POOLING_CLS,
    "max": manifest_pb2.POOLING_MAX,
}
# The older form: one flag for each.
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
# Older versions named it after the model within.
_LENGTH_FILES = [
    f"sentence_{model}_config.json" for model in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta")
]


@dataclasses.dataclass(frozen=True)
class SentenceVector:
    """How the model was trained to make one vector of a sequence.

    Attributes:
        pooling: How rows become one vector; unspecified where the checkpoint does not say.
        l2_normalize: Whether the vector is scaled to length 1.
    """

    pooling: manifest_pb2.Pooling = manifest_pb2.POOLING_UNSPECIFIED
    l2_normalize: bool = False


def read_sentence_vector(directory: Path) -> SentenceVector:
    """Reads modules.json and the pooling it names.

    Args:
        directory: The checkpoint; without a modules.json, nothing is known of pooling.

    Raises:
        UnsupportedModelError: The model does more to its rows than mean, cls or max pooling and normalising.
        CheckpointFileError: A file is unreadable.
    """
    if not (directory / "modules.json").is_file():
        return SentenceVector()
    vector = SentenceVector()
    for kind, folder in _modules(directory / "modules.json"):
        if kind == "Pooling":
            vector = dataclasses.replace(vector, pooling=_pooling(directory / folder / "config.json"))
        elif kind == "Normalize":
            vector = dataclasses.replace(vector, l2_normalize=True)
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"modules.json has a {kind} module, which a bundle cannot express; "
                "without modules.json the encoder alone is exported"
            )
    return vector


def read_max_seq_length(directory: Path) -> int | None:
    """The most tokens of a text that sentence-transformers gives the model, special ones included.

    Args:
        directory: The checkpoint.

    Returns:
        max_seq_length, or None where the checkpoint does not say.

    Raises:
        CheckpointFileError: The file that says it is unreadable, or says no length.
    """
    path = next((directory / name for name in _LENGTH_FILES if (directory / name).is_file()), None)
    length = None if path is None else read_object(path).get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointFileError(f"{path} must give max_seq_length as a number of tokens from 1; was {length!r}")
    return length


def _modules(path: Path) -> list[tuple[str, str]]:
    """The class name and the folder of each module."""
    try:
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in read_json(path)]
    except (TypeError, KeyError):
        raise CheckpointFileError(f"{path} must be a list of modules, each with a type and a path") from None


def _pooling(path: Path) -> manifest_pb2.Pooling:
    settings = read_object(path)
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    chosen = [_FLAGS.get(name, name) for name in modes] or [str(settings.get("pooling_mode"))]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise UnsupportedModelError(f"pooling must be one of {', '.join(POOLINGS)}; was {' and '.join(chosen)}")
    return POOLINGS[chosen[0]]
