"""The formats of vectors on OpenAI's and vLLM's routes, and further fields that clients of other servers send.

A field that changes the meaning of numbers is obeyed or refused, but never ignored. If the server ignored the field,
callers would misread the numbers.
"""

from encserve_server.errors import InvalidField
from encserve_server.protocols.http_json.requests import PooledBody, choice

_FORMATS = ("float", "base64")
# Vectors are little-endian float32 on any machine. Inputs are texts.
_CHOICES = {"embed_dtype": ("float32",), "endianness": ("native", "little"), "modality": ("text",)}


class FormatBody(PooledBody):
    """The fields that clients of OpenAI, vLLM and infinity send.

    Attributes:
        encoding_format: The format of vectors: float, or base64 of little-endian float32. Default: float.
        embed_dtype: vLLM's field for the type of the numbers in base64; must be float32.
        endianness: vLLM's field for the byte order of the numbers in base64; must be little or native. Native means
            little here.
        use_activation: vLLM's name for normalize.
        modality: infinity's field for the kind of the inputs; must be text.
    """

    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    use_activation: bool | None = None
    modality: str | None = None


def as_base64(fields: FormatBody) -> bool:
    """Check the fields for formats, and return whether vectors are written in base64.

    Raises:
        InvalidField: A field has a value that this server does not support.
    """
    for name, choices in _CHOICES.items():
        choice(name, getattr(fields, name), choices)
    return choice("encoding_format", fields.encoding_format, _FORMATS) == "base64"


def wants_normalized(fields: FormatBody) -> bool | None:
    """Return whether vectors are scaled to Euclidean length 1; None if the request does not set this.

    Raises:
        InvalidField: Two fields of the request contradict each other.
    """
    if None not in (fields.normalize, fields.use_activation) and fields.normalize is not fields.use_activation:
        raise InvalidField("use_activation", "must not differ from normalize, which means the same here")
    return fields.use_activation if fields.normalize is None else fields.normalize
