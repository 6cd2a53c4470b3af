"""The names of fields and values in error messages of JSON routes, and advice for a frequent error."""

from collections.abc import Mapping
from types import MappingProxyType

from encserve_server.errors import InvalidField, Naming, RequestField
from encserve_server.failures import Failure

_FIELDS = {field: field.name.lower() for field in RequestField} | {
    RequestField.OUTPUTS: "pooling",
    RequestField.OUTPUT: "pooling",
    RequestField.OUTPUT_KIND: "pooling",
    RequestField.OUTPUT_NORMALIZE: "normalize",
    RequestField.OUTPUT_DIMENSIONS: "dimensions",
    RequestField.OUTPUT_MAX_ACTIVE_DIMS: "max_active_dims",
    RequestField.MODEL_VERSION: "model",
}
_OF_INPUTS = (RequestField.INPUTS, RequestField.INPUT, RequestField.TEXT, RequestField.IDS, RequestField.VECTORS)
# By default, LangChain sends ids of OpenAI's tokenizer to any server.
_IDS_ADVICE = (
    ". Send text, or ids of this model's own tokenizer: LangChain's OpenAIEmbeddings sends text with "
    "check_embedding_ctx_length=False"
)


def http_naming(inputs: str, others: Mapping[RequestField, str] = MappingProxyType({})) -> Naming:
    """Return the names of fields in the error messages of some routes.

    `input[3][17]` is the 18th id of the fourth input. Other fields have no index.

    Args:
        inputs: The name of the field with the inputs.
        others: The names that only these routes use.
    """
    return Naming({**_FIELDS, **dict.fromkeys(_OF_INPUTS, inputs + "{at:[#]}{place:[#]}"), **others})


def text_of(failure: Failure) -> str:
    """Return the text of an error. If the error is about an unknown token id, the text ends with advice."""
    if failure.request_field is RequestField.IDS and failure.reason == InvalidField.reason:
        return failure.text + _IDS_ADVICE
    return failure.text
