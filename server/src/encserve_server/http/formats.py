"""How the vectors of OpenAI's and vLLM's routes are written, and what else other servers' clients ask of them.

A field that changes what numbers mean is honoured or refused, never ignored: its caller would read other numbers.
"""

from encserve_server.errors import InvalidField
from encserve_server.http.requests import PooledBody, choice

_FORMATS = ("float", "base64")
# What is sent is little-endian float32, whatever the machine; inputs are texts.
_CHOICES = {"embed_dtype": ("float32",), "endianness": ("native", "little"), "modality": ("text",)}


class FormatBody(PooledBody):
    """What OpenAI's clients send, vLLM's and infinity's.

    Attributes:
        encoding_format: How vectors are written: float, or base64 of little-endian float32.
        embed_dtype: The type of the numbers in base64, as vLLM calls it: float32.
        endianness: The order of their bytes, as vLLM calls it: little or native, which is little here.
        use_activation: The same as normalize, as vLLM calls it.
        modality: What inputs are, as infinity calls it: text.
    """

    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    use_activation: bool | None = None
    modality: str | None = None


def as_base64(fields: FormatBody) -> bool:
    """Whether numbers are written as base64 of their bytes.

    Raises:
        InvalidField: They are to be written in a way that there is not, or inputs are no texts.
    """
    for name, choices in _CHOICES.items():
        choice(name, getattr(fields, name), choices)
    return choice("encoding_format", fields.encoding_format, _FORMATS) == "base64"


def normalized(fields: FormatBody) -> bool | None:
    """Whether vectors are scaled to length 1; None where the request does not say.

    Raises:
        InvalidField: It says both.
    """
    if None not in (fields.normalize, fields.use_activation) and fields.normalize is not fields.use_activation:
        raise InvalidField("use_activation", "must not differ from normalize, which means the same here")
    return fields.use_activation if fields.normalize is None else fields.normalize
