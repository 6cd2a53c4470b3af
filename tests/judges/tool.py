"""Runs code blocks of a docs page. Each block has its own variables.

The program runs as `PROGRAM REQUESTS BLOCK...`. REQUESTS is a JSON file with `texts`. The code can use the variable
`texts`. Each BLOCK is a file with code that sets the variable `vectors` or `similarities`. The program saves this
variable in a .npy file with the name of BLOCK.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

requests_file, *blocks = map(Path, sys.argv[1:])
for block in blocks:
    names: dict[str, Any] = json.loads(requests_file.read_text(encoding="utf-8"))
    exec(compile(block.read_text(encoding="utf-8"), block, "exec"), names)  # noqa: S102 - runs lines of our docs
    np.save(block.with_suffix(".npy"), np.array(names["vectors"] if "vectors" in names else names["similarities"]))
