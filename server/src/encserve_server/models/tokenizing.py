"""Text to token ids with the bundle's own tokenizer: short texts where they are, long ones off the event loop."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from encserve_server.errors import BundleError, QueueFull
from encserve_server.types import TokenizedText

# `encode_batch` would bring threads of its own otherwise, which take the cores from the model.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Encoding, Tokenizer

# So much text, in all of a call, is tokenized at once: words take 0.1 ms, and a thread's turn 0.2 ms more. What takes
# longest, nonsense without spaces in WordPiece, takes 0.6 ms.
_AT_ONCE_BYTES = 256
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

    async def tokenize(
        self, texts: Sequence[str], max_tokens: int, take: Callable[[TokenizedText | str], None]
    ) -> None:
        """Tokenizes texts and hands each to `take` as soon as it is done, in order, cut to `max_tokens`.

        For a text that the tokenizer fails for, it hands over what the tokenizer says instead. Whether cutting was
        allowed is for `take` to judge: what it raises ends the work. A few words are tokenized at once; more text waits
        for a thread, and may find no room to wait.

        Raises:
            QueueFull: Too much text is waiting already.
        """
        size = sum(len(text.encode()) for text in texts)
        if size <= _AT_ONCE_BYTES:
            for text in self._tokenize(texts, max_tokens):
                take(text)
            return
        if self._queued_bytes and self._queued_bytes + size > self.max_queue_bytes:
            excess = self._queued_bytes + size - self.max_queue_bytes
            delay_s = min(max(excess / _BYTES_PER_SECOND, 0.05), 5.0)
            raise QueueFull("bytes of text", size, self._queued_bytes, self.max_queue_bytes, delay_s)
        loop = asyncio.get_running_loop()
        self._queued_bytes += size
        try:
            for turn in _turns(texts):
                for text in await loop.run_in_executor(self._executor, self._tokenize, turn, max_tokens):
                    take(text)
        finally:
            self._queued_bytes -= size

    def count_prompt(self, prompt: str) -> int:
        """The tokens of a prompt, those that stand before every text included; as sentence-transformers counts them."""
        special = self._tokenizer.encode(prompt).special_tokens_mask
        return len(special) - bool(special and special[-1])

    def token_string(self, token_id: int) -> str:
        """The vocabulary's string for an id; empty for an id that the tokenizer does not know."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _tokenize(self, texts: Sequence[str], max_tokens: int) -> list[TokenizedText | str]:
        try:
            # Not `encode`: it keeps Python's lock, and a long text takes a tenth of a second.
            return [_cut(encoding, max_tokens) for encoding in self._tokenizer.encode_batch(texts)]
        except Exception as error:  # tokenizers raises plain Exception, of all texts together
            if len(texts) == 1:
                return [str(error)]
            return [it for text in texts for it in self._tokenize([text], max_tokens)]


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
    ids, special = encoding.ids, encoding.special_tokens_mask
    count, closing = len(ids), 0
    if count <= max_tokens:
        offsets = encoding.offsets
    else:
        closing = next((i for i, it in enumerate(reversed(special)) if not it), count)  # special tokens after the text
        closing = min(closing, max_tokens)
        kept = [*range(max_tokens - closing), *range(count - closing, count)]
        ids, special = [ids[i] for i in kept], [special[i] for i in kept]
        offsets = [encoding.token_to_chars(i) or (0, 0) for i in kept]  # all of them would take a long text's time
    return TokenizedText(
        ids=np.array(ids, np.int64),
        char_starts=[start for start, _ in offsets],
        char_ends=[end for _, end in offsets],
        special=np.array(special, np.bool_),
        original_token_count=count,
        kept_behind=closing,
    )
