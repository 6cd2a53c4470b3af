"""The errors of an export, one class per cause.

The command line prints such an error as `Error: …` and exits with 1. Any other exception is a bug and keeps its
traceback.
"""

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # PyTorch writes them into its errors
# A terminal interprets these: control characters except line feed, and changes of the writing direction.
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape control characters. The names in a checkpoint may hold any."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ExportError(Exception):
    """The base class of the exporter's errors. The text is for the user, and safe to print."""

    def __str__(self) -> str:
        """The text with control characters escaped."""
        return printable(super().__str__())


class ConfigError(ExportError):
    """A setting is out of range, unknown, or contradicts another setting."""


class CheckpointFileError(ExportError):
    """A file of the checkpoint is missing or unreadable."""


class UnsafeWeightsError(ExportError):
    """The weights file holds objects that are not tensors. Loading them could run code."""


class UnsupportedModelError(ExportError):
    """The model does something that a bundle cannot express."""


class UnknownLayoutError(ExportError):
    """No layout fits the names of the weights."""


class EmbeddingTableError(ExportError):
    """The checkpoint has no table of token embeddings, or more than one."""


class WeightNamesError(ExportError):
    """Weights are missing or surplus."""


class WeightShapeError(ExportError):
    """A weight has another shape than the configuration says."""


class WeightValueError(ExportError):
    """A weight holds NaN or infinity, or does not hold floating-point numbers."""


class OnnxModelError(ExportError):
    """The ONNX file of the user cannot be used."""


class OnnxFileError(OnnxModelError):
    """The file is unreadable, invalid, empty, exported for training, or newer than ONNX Runtime."""


class ExternalDataError(OnnxModelError):
    """A file of external weights is outside the folder, missing, or too short."""


class OnnxInterfaceError(OnnxModelError):
    """The inputs or outputs do not fit an encoder. The text lists them."""


class OnnxRunError(OnnxModelError):
    """The model fails for a batch, or its rows have another shape or are not finite. The text names the batch."""


class VocabularyError(OnnxModelError):
    """The number of token ids is unknown, or smaller than the given one."""


class TokenizerError(ExportError):
    """The tokenizer is unreadable, does not fit the model, or has no tokenizer.json with the same ids."""


class HubError(ExportError):
    """A checkpoint cannot be downloaded from the hub."""


class ExpectedFileError(ExportError):
    """A file of expected rows is unreadable or does not fit the model. The text names the array."""


class ExpectedRowsError(ExportError):
    """The rows of the bundle differ from the rows of the user's module. The exporter tries no other route."""


class ParityError(ExportError):
    """ONNX Runtime does not reproduce PyTorch's rows, or padding changes the rows."""


class BundleError(ExportError):
    """The bundle cannot be written."""


class BundleNameError(BundleError):
    """The model's name or version cannot be the name of a folder."""


class BundleExistsError(BundleError):
    """This version of the model already exists."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, and the second after a colon, without terminal colours."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):
        return f"{type(error).__name__} {error}".strip()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
