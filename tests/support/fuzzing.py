"""Damages serialized messages for fuzz tests."""

import random


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a copy of `data` with one to four random changes.

    A change replaces a byte, removes the end of the data, or adds bytes.
    """
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(3):
            case 0 if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            case 1:
                del changed[rng.randrange(len(changed) + 1) :]
            case _:
                changed += rng.randbytes(rng.randint(1, 8))
    return bytes(changed)
