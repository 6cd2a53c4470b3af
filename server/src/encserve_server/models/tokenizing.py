"""Tokenizes texts with the bundle's tokenizer, and limits the size of waiting text."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from encserve_server.errors import BundleError, QueueFull
from encserve_server.models.pairs import PairLayout, pair_layout
from encserve_server.models.turns import FairThreadPool
from encserve_server.types.arrays import TokenIds
from encserve_server.types.bundles import TextTemplate
from encserve_server.types.sequences import TokenSequence

# Without this setting, `encode_batch` starts threads that take CPUs from the model.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Encoding, Tokenizer

# The approximate speed of one thread, for the retry delay of errors.
_BYTES_PER_SECOND = 1024 * 1024


class TextTokenizer:
    """The tokenizer of a tokenizer.json. The truncation and padding settings in the file are ignored.

    Attributes:
        pool: The threads, shared with other tokenizers.
        largest_id: The largest possible id of a text without added tokens, including the special tokens around a text.
        added_tokens: The added tokens by id. A text gets such an id only if the text contains the token's string.
        max_token_bytes: The number of UTF-8 bytes of the longest token in the vocabulary.
        max_queue_bytes: The maximum number of UTF-8 bytes of text that may wait or be tokenized at the same time.
        special_around: The ids of the special tokens before a text, and of the special tokens after a text.
        pair: The special tokens of a pair of texts; None if the tokenizer does not put one text after the other.
        template: The strings around every text, or None. `tokenize` does not add these strings.
    """

    def __init__(
        self,
        path: Path,
        pool: FairThreadPool,
        max_queue_bytes: int,
        *,
        split_special_tokens: bool = False,
        template: TextTemplate | None = None,
    ) -> None:
        """Load the file.

        Args:
            path: The file.
            pool: The threads for texts that are not short.
            max_queue_bytes: The maximum number of UTF-8 bytes of text that may wait or be tokenized at the same time.
            split_special_tokens: Whether a special token in a text, such as "[SEP]", is tokenized like other text.
            template: The strings around every text.

        Raises:
            BundleError: The file is not a tokenizer.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            # Many files have truncation settings from training, such as 128 tokens. They would cut texts silently.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = split_special_tokens
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            self.added_tokens = {i: it.content for i, it in self._tokenizer.get_added_tokens_decoder().items()}
            ordinary = set(vocabulary.values()) - self.added_tokens.keys()
            self.largest_id: int = max((*ordinary, *self._tokenizer.encode("").ids), default=0)
            sample = _sample(self._tokenizer, vocabulary)
            self.special_around = ((), ()) if sample is None else _special_around(self._tokenizer.encode(sample))
            self.pair: PairLayout | None = None
            if sample is not None:
                self.pair = pair_layout(self._tokenizer.encode(sample, sample))
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise BundleError(f"{path}: not a tokenizer: {error}") from None
        self.max_token_bytes = max((len(token.encode()) for token in vocabulary), default=0)
        self.template = template
        self._tokens_after = None if template is None else template.after_tokens
        self.pool = pool
        self.max_queue_bytes = max_queue_bytes
        self._queued_bytes = 0  # owned by the event loop

    @property
    def queued_bytes(self) -> int:
        """The number of UTF-8 bytes of text that waits or is being tokenized. Any thread may read this number."""
        return self._queued_bytes

    @contextlib.contextmanager
    def hold_bytes(self, size: int) -> Iterator[None]:
        """Count `size` bytes of text as queued until the end of the block. Call this on the event loop only.

        Raises:
            QueueFull: Too much text is queued. An empty queue accepts text of any size.
        """
        excess = self._queued_bytes + size - self.max_queue_bytes
        if self._queued_bytes and excess > 0:
            delay_s = min(max(excess / _BYTES_PER_SECOND, 0.05), 5.0)
            raise QueueFull("bytes of text", size, self._queued_bytes, self.max_queue_bytes, delay_s)
        self._queued_bytes += size
        try:
            yield
        finally:
            self._queued_bytes -= size

    def tokenize(self, texts: Sequence[str], max_tokens: int, *, details: bool) -> list[TokenSequence | str]:
        """Tokenize texts in the calling thread. Several threads may call this at the same time.

        Args:
            texts: The texts.
            max_tokens: Texts with more tokens are cut to this number of tokens.
            details: Whether to return the special tokens and the offsets of all tokens.

        Returns:
            For each text the tokens, or the text of the tokenizer's error.
        """
        try:
            # `encode` would hold the GIL: 0.1 s for a long text. The fast variant computes no offsets.
            encode = self._tokenizer.encode_batch if details else self._tokenizer.encode_batch_fast
            return [_sequence_of(it, max_tokens, details, self._tokens_after) for it in encode(texts)]
        except BaseException as error:  # an error in one text fails all texts
            if not _is_failure(error):
                raise
            if len(texts) == 1:
                return [str(error)]
            return [it for text in texts for it in self.tokenize([text], max_tokens, details=details)]

    def tokenize_plain(self, texts: Sequence[str]) -> list[TokenIds | str]:
        """Tokenize texts without special tokens around them, in the calling thread.

        Returns:
            For each text the (seq,) ids, or the text of the tokenizer's error.
        """
        try:
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(it.ids, np.int64) for it in encoded]
        except BaseException as error:  # an error in one text fails all texts
            if not _is_failure(error):
                raise
            return [str(error)] if len(texts) == 1 else [it for text in texts for it in self.tokenize_plain([text])]

    def cut_texts(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Cut the end of each text after `max_tokens` tokens. A text that the tokenizer fails for stays as it is."""
        try:
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except BaseException as error:  # an error in one text fails all texts
            if not _is_failure(error):
                raise
            return list(texts) if len(texts) == 1 else [self.cut_texts([text], max_tokens)[0] for text in texts]
        return [
            text[: it.offsets[max_tokens - 1][1]] if len(it.ids) > max_tokens else text
            for text, it in zip(texts, encoded, strict=True)
        ]

    def count_prompt(self, prompt: str) -> int:
        """Return the token count of a prompt, with the special tokens before the prompt, like sentence-transformers.

        Raises:
            BundleError: The tokenizer fails for the prompt.
        """
        try:
            special = self._tokenizer.encode(prompt).special_tokens_mask
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise BundleError(f"the tokenizer fails for the prompt {prompt!r}: {error}") from None
        return len(special) - bool(special and special[-1])

    def token_string(self, token_id: int) -> str:
        """Return the token of an id; empty if the tokenizer does not know the id."""
        return self._tokenizer.id_to_token(token_id) or ""


def _is_failure(error: BaseException) -> bool:
    """Return whether an error may come from the tokenizers library: an Exception, or PyO3's PanicException.

    PanicException is a panic of Rust code. It derives from BaseException and cannot be imported:
    https://pyo3.rs/main/doc/pyo3/panic/struct.PanicException
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _sample(tokenizer: Tokenizer, words: Iterable[str]) -> str | None:
    """Return a text that has a token that is not special: "a" or one of `words`. None if no such text is found."""
    for text in ("a", *words):  # without an unk token, the tokenizer may know only the words of its vocabulary
        try:
            encoding = tokenizer.encode(text)
        except BaseException as error:
            if not _is_failure(error):
                raise
            continue
        if not all(encoding.special_tokens_mask):
            return text
    return None


def _special_around(encoding: Encoding) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the special tokens before and after a text."""
    own = [i for i, it in enumerate(encoding.special_tokens_mask) if not it]
    return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])


def _sequence_of(encoding: Encoding, max_tokens: int, details: bool, tokens_after: int | None) -> TokenSequence:
    """Return the tokens of a text, cut to `max_tokens`; see `_cut`."""
    ids = encoding.ids
    count = len(ids)
    if count > max_tokens:
        return _cut(encoding, max_tokens, details, tokens_after)
    sequence = TokenSequence(np.array(ids, np.int64), count)
    if details:
        sequence.special = np.array(encoding.special_tokens_mask, np.bool_)
        offsets = encoding.offsets
        sequence.char_starts, sequence.char_ends = [it[0] for it in offsets], [it[1] for it in offsets]
    return sequence


def _cut(encoding: Encoding, max_tokens: int, details: bool, tokens_after: int | None) -> TokenSequence:
    """Return the first tokens and the closing tokens of a text, `max_tokens` in total.

    The closing tokens are the last `tokens_after` tokens. If `tokens_after` is None, the closing tokens are the special
    tokens at the end.
    """
    ids, special = encoding.ids, encoding.special_tokens_mask
    count = len(ids)
    closing = tokens_after
    if closing is None:
        closing = next((i for i, it in enumerate(reversed(special)) if not it), count)
    closing = min(closing, max_tokens)
    kept = [*range(max_tokens - closing), *range(count - closing, count)]
    sequence = TokenSequence(np.array([ids[i] for i in kept], np.int64), count, kept_after=closing)
    if details:
        sequence.special = np.array([special[i] for i in kept], np.bool_)
        offsets = [encoding.token_to_chars(i) or (0, 0) for i in kept]  # `encoding.offsets` is slow for a long text
        sequence.char_starts, sequence.char_ends = [it[0] for it in offsets], [it[1] for it in offsets]
    return sequence
