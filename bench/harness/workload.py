"""Makes the workload: the sequences for the compared programs. All programs get the same sequences."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from encserve_cli.load.lengths import real_text_lengths, sample_lengths
from encserve_server.repository.bundle import read_bundle
from encserve_server.repository.scan import find_slots, require
from encserve_server.types.bundles import Bundle

TokenIds = npt.NDArray[np.int64]  # (seq,)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences in order of arrival.

    Attributes:
        sequences: The token ids of each sequence, (seq,), including special tokens.
        texts: The same sequences as texts. The list is empty if the ids are random.
    """

    sequences: list[TokenIds]
    texts: list[str] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence, without padding."""
        return [len(sequence) for sequence in self.sequences]

    @property
    def tokens(self) -> int:
        """The total number of tokens."""
        return sum(self.lengths)


def read_newest(model_repository: Path, model: str | None) -> Bundle:
    """Return a bundle. A bundle is an exported model. `model` is NAME, NAME@VERSION or None.

    NAME means the newest version of a model. None means the newest version of the first model.

    Raises:
        BundleError: The bundle is missing or not usable.
    """
    slots = require(model_repository, find_slots(model_repository, (model,) if model else ()))
    return read_bundle(slots[0].candidates[0].directory)


def choose_lengths(count: int, *, seed: int, longest: int, given: Sequence[int] = ()) -> list[int]:
    """Return `count` lengths of at most `longest` tokens.

    If `given` has lengths, repeat them in order. Otherwise sample the lengths of real texts.
    """
    lengths = itertools.cycle(given) if given else sample_lengths(real_text_lengths(), count, seed)
    return [min(int(length), longest) for length in itertools.islice(lengths, count)]


def random_workload(lengths: Sequence[int], *, vocab_size: int, seed: int) -> Workload:
    """Make sequences of random ids. The computing time of a dense encoder does not depend on the ids."""
    rng = np.random.default_rng(seed)
    return Workload([rng.integers(0, vocab_size, length) for length in lengths])


def text_workload(bundle: Bundle, lengths: Sequence[int], *, seed: int) -> Workload:
    """Make texts of random words. Each word is one token. A text's length includes special tokens.

    Raises:
        ValueError: The model has no tokenizer, or no word is a single token. Or a length is too small, or the
            tokenizer makes more or fewer tokens than the length.
    """
    if bundle.tokenizer_file is None:
        raise ValueError(f"{bundle.name} has no tokenizer, so it does not take texts")
    tokenizer = open_tokenizer(bundle.tokenizer_file)
    words = single_token_words(tokenizer)
    if not words:
        raise ValueError(f"{bundle.name}: the vocabulary has no word that is a single token")
    special = len(tokenizer.encode("").ids)
    rng = np.random.default_rng(seed)
    texts, sequences = [], []
    for length in lengths:
        if length <= special:
            raise ValueError(f"each length must be more than {special}, the number of special tokens; was {length}")
        texts.append(" ".join(words[index] for index in rng.integers(0, len(words), length - special)))
        ids: TokenIds = np.array(tokenizer.encode(texts[-1]).ids, np.int64)  # (seq,)
        if len(ids) != length:
            raise ValueError(f"expected {length} tokens but the tokenizer made {len(ids)} from {texts[-1][:60]!r}")
        sequences.append(ids)
    return Workload(sequences, texts)


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer file, with truncation and padding turned off."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Return the words of ASCII letters that are one token both at the start of a text and after a word.

    The words are in alphabetical order.
    """
    # In some vocabularies, a token has a marker, such as "▁", before the first letter of a word.
    names = {name.lstrip("Ġ▁") for name in tokenizer.get_vocab()}
    words = sorted(name for name in names if name.isascii() and name.isalpha())
    once, twice = (
        [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        for texts in (words, [f"{word} {word}" for word in words])
    )
    return [word for word, one, two in zip(words, once, twice, strict=True) if (one, two) == (1, 2)]


def windows(sequences: Sequence[TokenIds], size: int) -> list[list[TokenIds]]:
    """Split sequences into consecutive groups of `size`. The last group may be smaller."""
    return [list(sequences[start : start + size]) for start in range(0, len(sequences), size)]


def sorted_batches(sequences: Sequence[TokenIds], max_padded_tokens: int) -> list[list[TokenIds]]:
    """Sort sequences by length, and split them into batches of at most `max_padded_tokens` tokens, including padding.

    A sequence that exceeds the limit is alone in a batch.
    """
    batches: list[list[TokenIds]] = []
    for sequence in sorted(sequences, key=len):
        # The order is ascending, so the last sequence of a batch is the longest.
        if batches and len(sequence) * (len(batches[-1]) + 1) <= max_padded_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches
