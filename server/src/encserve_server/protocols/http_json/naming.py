"""Names of fields and values in the errors of JSON routes, and advice in their texts."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from encserve_server.error_table import Failure
from encserve_server.errors import FieldPath, InvalidField, Part

_FIELDS = {
    Part.OUTPUTS: "pooling",
    Part.OUTPUT: "pooling",
    Part.OUTPUT_KIND: "pooling",
    Part.OUTPUT_NORMALIZE: "normalize",
    Part.OUTPUT_DIMENSIONS: "dimensions",
    Part.OUTPUT_MAX_ACTIVE_DIMS: "max_active_dims",
    Part.MODEL_VERSION: "model",
}
_OF_INPUTS = frozenset({Part.INPUTS, Part.INPUT, Part.TEXT, Part.IDS, Part.VECTORS})
# By default, LangChain sends ids of OpenAI's tokenizer to any server.
_IDS_ADVICE = (
    ". Send text, or ids of this model's own tokenizer: LangChain's OpenAIEmbeddings sends text with "
    "check_embedding_ctx_length=False"
)


class HttpNaming:
    """See `errors.Naming`."""

    def __init__(self, inputs: str, others: Mapping[Part, str] = MappingProxyType({})) -> None:
        """Keep the name of the field with the inputs, and names that only these routes have."""
        self._inputs = inputs
        self._fields = {**_FIELDS, **others}

    def field(self, path: FieldPath) -> str:
        """Return a name such as `input[3][17]`, the 18th id of the fourth input. Other fields have no index here."""
        if path.part not in _OF_INPUTS:
            return self._fields.get(path.part) or path.part.name.lower()
        return self._inputs + "".join(f"[{place}]" for place in (path.at, path.place) if place is not None)

    def value(self, value: Enum) -> str:
        """Return a name such as `query`."""
        return value.name.lower()


def text_of(failure: Failure) -> str:
    """Return the text of an error, with advice if the error is about an id that the model does not have."""
    if failure.part is Part.IDS and failure.reason == InvalidField.reason:
        return failure.text + _IDS_ADVICE
    return failure.text
