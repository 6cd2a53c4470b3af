"""Defines the errors of an export, one class per cause.

The command line prints such an error as `Error: …` and exits with 1. Any other exception is a bug. Its traceback is
printed.
"""

import errno
import re

# The errors of a full disk, an exhausted quota, and a limit on the size of files.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # PyTorch writes colour codes into its errors
# A terminal interprets these characters: control characters except line feed, and characters that change the writing
# direction.
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape control characters. The names in a checkpoint may contain any character."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ExportError(Exception):
    """The base class of the exporter's errors. The error text is for the user and is safe to print."""

    def __str__(self) -> str:
        """Return the error text with control characters escaped."""
        return printable(super().__str__())


class ConfigError(ExportError):
    """A setting is out of range, unknown, or contradicts another setting."""


class CheckpointFileError(ExportError):
    """A file of the checkpoint is missing or unreadable."""


class UnsafeWeightsError(ExportError):
    """The weights file contains objects that are not tensors. Loading such objects could run code."""


class UnsupportedModelError(ExportError):
    """The model has a feature that a bundle cannot express."""


class UnknownLayoutError(ExportError):
    """The names of the weights fit no known layout of a checkpoint."""


class EmbeddingTableError(ExportError):
    """The checkpoint has no table of token embeddings, or several tables."""


class WeightNamesError(ExportError):
    """The checkpoint lacks a weight of the model, or has a weight that the model does not have."""


class WeightShapeError(ExportError):
    """The shape of a weight contradicts the configuration."""


class WeightValueError(ExportError):
    """A weight contains NaN or infinity, or is not of a floating-point type."""


class OnnxModelError(ExportError):
    """The ONNX file of the user cannot be used."""


class OnnxFileError(OnnxModelError):
    """The file is unreadable, invalid, empty, exported for training, or too new for ONNX Runtime."""


class ExternalDataError(OnnxModelError):
    """A file of external weights is outside the model's folder, missing, or too short."""


class OnnxInterfaceError(OnnxModelError):
    """The inputs or outputs of the model do not fit an encoder. The error text lists the inputs or outputs."""


class OnnxRunError(OnnxModelError):
    """The model fails for a batch, or its hidden states have a wrong shape or are not finite.

    The error text describes the batch.
    """


class VocabularyError(OnnxModelError):
    """The number of token ids is unknown, or the number that the user gave is too small or too large."""


class TokenizerError(ExportError):
    """The tokenizer is unreadable, does not fit the model, or cannot be saved as a tokenizer.json with the same ids."""


class ExpectedFileError(ExportError):
    """A file of expected hidden states is unreadable or does not fit the model. The error text names the array."""


class ExpectedRowsError(ExportError):
    """The bundle's hidden states differ from the hidden states that the user's module computed.

    After this error, the exporter does not try another way to export, such as the route "onnx" of `hf`.
    """


class ParityError(ExportError):
    """The bundle's outputs differ from the original model's, or padding changes the hidden states."""


class BundleError(ExportError):
    """The bundle cannot be written."""


class BundleNameError(BundleError):
    """The model's name or version cannot be the name of a folder."""


class BundleExistsError(BundleError):
    """This version of the model already exists."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, without terminal colours.

    If the first line ends with a colon, the second line is added.
    """
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):
        return f"{type(error).__name__} {error}".strip()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
