"""Positions in a text, in code points and in bytes."""

import numpy as np
import numpy.typing as npt


def utf8_offsets(text: str) -> npt.NDArray[np.int64]:
    """Return the number of UTF-8 bytes before each code point, (len(text) + 1,).

    The last entry is the number of bytes of the whole text.
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")  # (len(text),)
    sizes = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    offsets = np.zeros(len(text) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
