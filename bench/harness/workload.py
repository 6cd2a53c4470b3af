"""What every side is given: the same sequences, of lengths that real texts have, in the same order of arrival."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from encserve_cli.load import real_text_lengths, sample_lengths
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.scan import find_slots, require
from encserve_server.types.bundles import Bundle

Sequence64 = npt.NDArray[np.int64]  # (seq,) token ids


@dataclass(frozen=True, slots=True)
class Workload:
    """The sequences in order of arrival.

    Attributes:
        sequences: (seq,) ids each, special tokens included.
        texts: The same as texts; empty where nobody takes them.
    """

    sequences: list[Sequence64]
    texts: list[str] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """In tokens, without any padding."""
        return [len(it) for it in self.sequences]

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(self.lengths)


def read_newest(model_repository: Path, model: str | None) -> Bundle:
    """The bundle of one model's newest version, or of NAME@VERSION; without a model of the first by name.

    Raises:
        BundleError: It is not there, or is not usable.
    """
    slots = require(model_repository, find_slots(model_repository, (model,) if model else ()))
    return read_bundle(slots[0].candidates[0].directory)


def choose_lengths(count: int, *, seed: int, longest: int, given: Sequence[int] = ()) -> list[int]:
    """So many lengths in tokens, none over `longest`: those that are given, in turn, or else those of real texts."""
    lengths = itertools.cycle(given) if given else sample_lengths(real_text_lengths(), count, seed)
    return [min(int(it), longest) for it in itertools.islice(lengths, count)]


def random_workload(lengths: Sequence[int], *, vocab_size: int, seed: int) -> Workload:
    """Sequences of random ids: which they are does not matter to the time that a dense encoder takes."""
    rng = np.random.default_rng(seed)
    return Workload([rng.integers(0, vocab_size, length) for length in lengths])


def text_workload(lengths: Sequence[int], tokenizer: Tokenizer, *, seed: int) -> Workload:
    """Texts of these lengths, special tokens counted, made of random words that are one token each.

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
    return Workload(sequences, texts)


def open_tokenizer(path: Path) -> Tokenizer:
    """The model's own tokenizer, without what its file may say of truncation and padding."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def single_words(tokenizer: Tokenizer) -> list[str]:
    """Words of a vocabulary, of ASCII letters, that are one token between two other words; in alphabetical order."""
    # Some vocabularies mark a word's beginning, so that a word is found under another name.
    names = {name.lstrip("Ġ▁") for name in tokenizer.get_vocab()}
    words = sorted(name for name in names if name.isascii() and name.isalpha())
    once, twice = (
        [len(it.ids) for it in tokenizer.encode_batch(texts, add_special_tokens=False)]
        for texts in (words, [f"{word} {word}" for word in words])
    )
    return [word for word, one, two in zip(words, once, twice, strict=True) if (one, two) == (1, 2)]


def windows(sequences: Sequence[Sequence64], size: int) -> list[list[Sequence64]]:
    """Cuts into runs of `size` in order of arrival; the last may be shorter."""
    return [list(sequences[start : start + size]) for start in range(0, len(sequences), size)]


def sorted_batches(sequences: Sequence[Sequence64], max_padded_tokens: int) -> list[list[Sequence64]]:
    """Sorts by length and cuts into batches of at most so many padded tokens (longest × count).

    A sequence that is longer than that runs alone.
    """
    batches: list[list[Sequence64]] = []
    for sequence in sorted(sequences, key=len):
        # In ascending order the newest is the longest.
        if batches and len(sequence) * (len(batches[-1]) + 1) <= max_padded_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches
