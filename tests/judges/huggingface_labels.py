"""Classifies texts with huggingface_hub.

The program runs as `PROGRAM ADDRESS REQUESTS` in the virtual environment of the requirements file clients.txt. REQUESTS
is a JSON file with `texts`. For each call, the program prints a list with the labels and the scores of each text.
"""

import json
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import InferenceClient

address, requests_file = sys.argv[1:]
client = InferenceClient(f"{address}/predict")
calls: dict[str, dict[str, Any]] = {
    "default": {},
    "logits": {"function_to_apply": "none"},
    "best": {"top_k": 1},
}
found = {
    name: [
        [(it.label, it.score) for it in client.text_classification(text, **options)]
        for text in json.loads(Path(requests_file).read_text(encoding="utf-8"))["texts"]
    ]
    for name, options in calls.items()
}
sys.stdout.write(f"\n{json.dumps(found)}")
