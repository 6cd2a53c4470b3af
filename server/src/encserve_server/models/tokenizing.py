"""Text to token ids with the bundle's own tokenizer, off the event loop."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from encserve_server.errors import BundleError, QueueFull
from encserve_server.types import TokenizedText

# So much text is tokenized at a time; then whoever else waits has a turn, and a caller that has gone is noticed.
_TURN_BYTES = 64 * 1024
# What one thread tokenizes in a second, about; only to say when trying again makes sense.
_BYTES_PER_SECOND = 1024 * 1024


class TextTokenizer:
    """A tokenizer.json, used as it was trained but without the truncation and padding baked into the file.

    Attributes:
        largest_id: The largest id that it may give; also of those that it puts around a text, which need not be in its
            vocabulary.
        max_token_bytes: The longest string of its vocabulary, in bytes of UTF-8.
    """

    def __init__(self, path: Path, executor: Executor, max_queue_bytes: int) -> None:
        """Loads the file.

        Args:
            path: The file.
            executor: Where the work is done.
            max_queue_bytes: The most text that may wait or be worked on, in bytes of UTF-8.

        Raises:
            BundleError: The file is no tokenizer.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise BundleError(f"{path}: not a tokenizer: {error}") from error
        # Files often carry the settings of training, such as "cut at 128, pad to 128": they would cut in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.largest_id: int = max((*vocabulary.values(), *self._tokenizer.encode("").ids), default=0)
        self.max_token_bytes = max((len(token.encode()) for token in vocabulary), default=0)
        self._executor = executor
        self.max_queue_bytes = max_queue_bytes
        self._queued_bytes = 0  # owned by the event loop

    @property
    def queued_bytes(self) -> int:
        """The text that waits or is worked on, in bytes of UTF-8; any thread may ask."""
        return self._queued_bytes

    async def tokenize(self, texts: Sequence[str], max_tokens: int) -> AsyncGenerator[TokenizedText, None]:
        """Tokenizes texts and gives each as soon as it is done, in order, cut to `max_tokens`.

        Whether cutting was allowed is for the caller to judge; one that stops asking ends the work.

        Raises:
            QueueFull: Too much text is waiting already.
        """
        size = sum(len(text.encode()) for text in texts)
        if self._queued_bytes and self._queued_bytes + size > self.max_queue_bytes:
            excess = self._queued_bytes + size - self.max_queue_bytes
            delay_s = min(max(excess / _BYTES_PER_SECOND, 0.05), 5.0)
            raise QueueFull("bytes of text", size, self._queued_bytes, self.max_queue_bytes, delay_s)
        loop = asyncio.get_running_loop()
        self._queued_bytes += size
        try:
            for turn in _turns(texts):
                for text in await loop.run_in_executor(self._executor, self._tokenize, turn, max_tokens):
                    yield text
        finally:
            self._queued_bytes -= size

    def token_string(self, token_id: int) -> str:
        """The vocabulary's string for an id; empty for an id that the tokenizer does not know."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _tokenize(self, texts: Sequence[str], max_tokens: int) -> list[TokenizedText]:
        # Not encode_batch: it would bring threads of its own, which take the cores from the model.
        return [_cut(self._tokenizer.encode(text), max_tokens) for text in texts]


def _turns(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in runs of at most `_TURN_BYTES` characters, or of one text."""
    turn: list[str] = []
    size = 0
    for text in texts:
        if turn and size + len(text) > _TURN_BYTES:
            yield turn
            turn, size = [], 0
        turn.append(text)
        size += len(text)
    if turn:
        yield turn


def _cut(encoding: Encoding, max_tokens: int) -> TokenizedText:
    """An encoding with tokens dropped from the end of the text, but the special tokens after it kept."""
    ids = np.array(encoding.ids, np.int64)  # (seq,)
    special = np.array(encoding.special_tokens_mask, np.bool_)  # (seq,)
    offsets = encoding.offsets
    count = len(ids)
    if count > max_tokens:
        closing = count if special.all() else int(np.argmin(special[::-1]))  # special tokens after the text
        closing = min(closing, max_tokens)
        kept = np.r_[: max_tokens - closing, count - closing : count]  # (max_tokens,)
        ids, special = ids[kept], special[kept]
        offsets = [offsets[i] for i in kept]
    return TokenizedText(
        ids=ids,
        char_starts=[start for start, _ in offsets],
        char_ends=[end for _, end in offsets],
        special=special,
        original_token_count=count,
    )
