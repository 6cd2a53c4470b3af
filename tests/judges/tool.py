"""Runs lines of a docs page: `PROGRAM REQUESTS BLOCK...`, each block on its own.

REQUESTS is JSON with `texts`, a variable of the blocks. The `vectors` or `similarities` of a block go into BLOCK.npy.
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
