"""Names of fields and values in the errors of OpenAI's routes and of text-embeddings-inference's routes."""

from collections.abc import Mapping
from types import MappingProxyType

from encserve_server.errors import Naming, RequestField

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


def http_naming(inputs: str, others: Mapping[RequestField, str] = MappingProxyType({})) -> Naming:
    """Return the names of routes, from the name of their field with the inputs, and names that only they have.

    `input[3][17]` is the 18th id of the fourth input. Other fields have no index.
    """
    return Naming({**_FIELDS, **dict.fromkeys(_OF_INPUTS, inputs + "{at:[#]}{place:[#]}"), **others})
