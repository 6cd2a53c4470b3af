"""Tests of pairs of texts. The server and the library tokenizers truncate pairs in the same way.

Both return the same ids and token types.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from encserve_server.engine.padding import lay_out
from encserve_server.models.pairs import kept_tokens
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.models.turns import FairThreadPool
from encserve_server.types.bundles import Graph

WORDS = {f"w{i}": i for i in range(30)}
# Each template joins two texts into one sequence. A key names a family of models, or a property of the template.
TEMPLATES = {
    "bert": processors.TemplateProcessing(
        single="w1 $A w2", pair="w1 $A w2 $B:1 w2:1", special_tokens=[("w1", 1), ("w2", 2)]
    ),
    "roberta": processors.RobertaProcessing(("w2", 2), ("w1", 1)),
    "no special tokens": processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[]),
    "sep of the second text": processors.TemplateProcessing(
        single="w1 $A w2", pair="w1 $A w2:1 w3:1 $B:1 w2:1", special_tokens=[("w1", 1), ("w2", 2), ("w3", 3)]
    ),
}


def tokenizer_with(template: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TEMPLATES[template]
    return tokenizer


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    pool, found = FairThreadPool(1), {}
    for name in TEMPLATES:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer_with(name).save(str(path))
        found[name] = TextTokenizer(Path(path), pool, 2**20)
    return found


@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    first=st.integers(0, 12),
    second=st.integers(0, 12),
    limit=st.integers(5, 24),
    only_second=st.booleans(),
)
def test_a_pair_is_cut_as_the_library_cuts_it(
    ours: dict[str, TextTokenizer], template: str, first: int, second: int, limit: int, only_second: bool
) -> None:
    layout = ours[template].pair
    assert layout is not None
    room = limit - layout.special_tokens
    kept = kept_tokens(first, second, room, cuts_only_second=only_second)
    texts = [" ".join(f"w{i + begin}" for i in range(count)) for begin, count in ((5, first), (17, second))]
    library = tokenizer_with(template)
    library.enable_truncation(limit, strategy="only_second" if only_second else "longest_first")
    if kept is None:
        assert first + second > room
        with pytest.raises(Exception, match="Truncation error"):
            library.encode(texts[0], texts[1])
        return
    assume(not only_second or first + second <= room or second > first + second - room)
    want = library.encode(texts[0], texts[1])
    ids = [np.array(it) for it in ours[template].tokenize_plain(texts)]
    sequence = layout.join(ids[0], ids[1], kept)
    assert sequence.input.tolist() == want.ids
    types = [int(bool(sequence.second_start) and i >= sequence.second_start) for i in range(len(want.ids))]
    assert types == want.type_ids
    assert sequence.original_token_count == first + second + layout.special_tokens


def test_token_types_are_fed_to_graphs_with_that_input() -> None:
    fields: dict[str, Any] = {
        "path": Path("model.onnx"), "input_name": "ids", "takes_vectors": False, "attention_mask_name": "mask",
        "output_name": "rows", "pad_token_id": 0, "d_model": 4, "precision": "float32",
    }  # fmt: skip
    sequences = [np.arange(5), np.arange(3), np.arange(4)]
    feeds, _ = lay_out(Graph(**fields, token_type_ids_name="types"), sequences, second_starts=[2, 0, 3])
    assert feeds["types"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    feeds, _ = lay_out(Graph(**fields, token_type_ids_name="types"), sequences[:1], second_starts=[4])
    assert feeds["types"].tolist() == [[0, 0, 0, 0, 1]]
    feeds, _ = lay_out(Graph(**fields, token_type_ids_name="types"), sequences)
    assert not feeds["types"].any()
    feeds, _ = lay_out(Graph(**fields), sequences, second_starts=[2, 0, 3])
    assert sorted(feeds) == ["ids", "mask"]
