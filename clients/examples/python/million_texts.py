"""Write the vectors of a million texts to vectors.f16, with little memory. An argument changes the number of texts."""

import sys
from pathlib import Path

from encserve_client import EncoderClient, EncserveError

count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
texts = (f"text number {number}" for number in range(count))  # or the lines of a file
with EncoderClient() as client, Path("vectors.f16").open("wb") as file:
    for _, vector in client.stream(texts, dtype="float16"):  # in the order of the texts
        if isinstance(vector, EncserveError):
            raise vector
        file.write(vector.tobytes())
    print(f"{count:,} vectors, {file.tell():,} bytes")
