"""What can go wrong in an export, one class per cause.

The command line shows any of them as `Error: …` and exits with 1. Any other exception is a bug and keeps its traceback.
"""

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # PyTorch's, in its errors
# What a terminal would obey in place of showing: control characters but for the end of a line, changes of direction.
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text with its control characters written out: a checkpoint may have any in its names."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class ExportError(Exception):
    """The root of all errors here; its text is meant for the person who ran the export, and safe to print."""

    def __str__(self) -> str:
        """The text, control characters written out."""
        return printable(super().__str__())


class ConfigError(ExportError):
    """A field of EncoderConfig is out of range or unknown; the text names it and the numbers."""


class CheckpointError(ExportError):
    """The checkpoint cannot be used."""


class CheckpointFileError(CheckpointError):
    """A file of the checkpoint is missing or unreadable."""


class UnsafeWeightsError(CheckpointError):
    """The weights file holds more than tensors: loading it would execute code from it."""


class UnsupportedModelError(CheckpointError):
    """The model computes something the Encoder does not."""


class UnknownLayoutError(CheckpointError):
    """No layout fits the names of the weights; the text lists both."""


class EmbeddingTableError(CheckpointError):
    """There is no table of token embeddings, or more than one."""


class WeightNamesError(CheckpointError):
    """Weights are missing, or there are some that nobody asked for."""


class WeightShapeError(CheckpointError):
    """A weight has another shape than the configuration says."""


class WeightValueError(CheckpointError):
    """A weight holds NaN or infinity, or is not of floating-point numbers."""


class OnnxModelError(ExportError):
    """An ONNX file of somebody else's cannot be used."""


class OnnxFileError(OnnxModelError):
    """The file is unreadable, not valid, empty, or made for training, or ONNX Runtime lacks an operator or version."""


class ExternalDataError(OnnxModelError):
    """Weights that lie in other files are outside the folder, missing, or not where the file says."""


class OnnxInterfaceError(OnnxModelError):
    """The inputs or outputs are not those of an encoder; the text lists what there is."""


class OnnxRunError(OnnxModelError):
    """The model fails for a batch, or gives rows of another shape or that are not finite; the text names the batch."""


class VocabularyError(OnnxModelError):
    """Nothing tells how many token ids the model has, or it has fewer than were asked for."""


class TokenizerError(ExportError):
    """The tokenizer is unreadable, gives ids that the model does not have, or has no file that gives its ids."""


class SequenceError(ExportError):
    """A text or ids to look at are missing, too many, or outside the vocabulary."""


class HubError(ExportError):
    """A checkpoint cannot be had from the hub: it is not there, not open, or the hub is not reached."""


class ExpectedFileError(ExportError):
    """A file of expected rows is unreadable, or does not fit the model; the text names the array and what it holds."""


class ExpectedRowsError(ExportError):
    """The bundle gives other rows than the caller's own module did; no other route is tried."""


class ParityError(ExportError):
    """ONNX Runtime does not reproduce PyTorch, or padding changes a result."""


class BundleError(ExportError):
    """The bundle cannot be written."""


class BundleNameError(BundleError):
    """The model's name or version is not a plain name."""


class BundleExistsError(BundleError):
    """This version of the model is already there."""


def uncoloured(error: Exception) -> str:
    """What another library's error says, without the colours of a terminal."""
    return _COLOURS.sub("", str(error))


def first_line(error: Exception) -> str:
    """What another library's error says, in one line and without colours; a line that ends with ":" goes on."""
    lines = [line.strip() for line in uncoloured(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):
        return f"{type(error).__name__} {error}".strip()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
