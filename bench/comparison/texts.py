"""Texts that have exactly so many tokens, for servers that take nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from comparison.workload import Sequence64, Workload


@dataclass(frozen=True, slots=True)
class Texts:
    """The same sequences as texts and as ids, in order of arrival.

    Attributes:
        texts: One each.
        workload: Their ids, special tokens included.
    """

    texts: list[str]
    workload: Workload

    @property
    def lengths(self) -> list[int]:
        """In tokens."""
        return [len(it) for it in self.workload.sequences]


def open_tokenizer(path: Path) -> Tokenizer:
    """The model's own tokenizer, without what its file may say of truncation and padding."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def make_texts(tokenizer: Tokenizer, lengths: Sequence[int], *, about: str, seed: int) -> Texts:
    """Makes a text of each length in tokens, special tokens counted, out of random words that are one token each.

    Raises:
        ValueError: A length leaves no room for a word; or the tokenizer does not see the words one by one.
    """
    special = len(tokenizer.encode("").ids)
    words = single_words(tokenizer)
    if not words:
        raise ValueError("no word of the vocabulary is one token of its own")
    rng = np.random.default_rng(seed)
    texts, sequences = [], []
    for length in lengths:
        if length <= special:
            raise ValueError(f"a text of {length} tokens has no room for a word beside {special} special ones")
        texts.append(" ".join(words[it] for it in rng.integers(0, len(words), length - special)))
        ids: Sequence64 = np.array(tokenizer.encode(texts[-1]).ids, np.int64)  # (seq,)
        if len(ids) != length:
            raise ValueError(f"a text of {length} words and special tokens has {len(ids)} tokens: {texts[-1][:60]!r}")
        sequences.append(ids)
    return Texts(texts, Workload(sequences, about))


def single_words(tokenizer: Tokenizer) -> list[str]:
    """Words of a vocabulary, of ASCII letters, that are one token between two other words; in alphabetical order."""
    # Some vocabularies mark a word's beginning, so that a word is found under another name.
    names = {name.lstrip("Ġ▁") for name in tokenizer.get_vocab()}
    words = sorted(name for name in names if name.isascii() and name.isalpha())

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return [word for word in words if tokens(word) == 1 and tokens(f"{word} {word}") == 2]
