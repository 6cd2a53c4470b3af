"""Text to token ids with the bundle's own tokenizer: short texts where they are, long ones off the event loop."""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from encserve_server.errors import BundleError, QueueFull
from encserve_server.models.turns import FairThreadPool
from encserve_server.types.bundles import TextTemplate
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.sequences import TokenSequence

# `encode_batch` would bring threads of its own otherwise, which take the cores from the model.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Encoding, Tokenizer

# So much text, in all of a call, is tokenized at once: words take 0.1 ms, and a thread's turn 0.2 ms more. What takes
# longest, nonsense without spaces in WordPiece, takes 0.6 ms.
_AT_ONCE_BYTES = 256
# So much text is tokenized at a time, in some 5 ms; then other callers have a turn, and one that has gone is noticed.
_TURN_CHARS = 8 * 1024
# So much text is counted at a time, in 0.2 ms.
_COUNTED_CHARS = 64 * 1024
# What one thread tokenizes in a second, about; only to say when trying again makes sense.
_BYTES_PER_SECOND = 1024 * 1024


class TextTokenizer:
    """A tokenizer.json, used as it was trained but without the truncation and padding baked into the file.

    Attributes:
        largest_id: The largest id that a text without added tokens can have, special tokens around the text included.
        added_tokens: The added tokens by id. A text has such an id only if the token is written out in the text.
        max_token_bytes: The longest string of its vocabulary, in bytes of UTF-8.
        special_around: The special tokens that it puts before a text, and those behind.
        template: What stands around every text, or None; the caller of `tokenize` puts it there.
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
        """Loads the file.

        Args:
            path: The file.
            pool: Where `tokenize` has its work done.
            max_queue_bytes: The most text that may wait or be worked on, in bytes of UTF-8.
            split_special_tokens: Whether a special token that is written out in a text is tokenized like other text.
            template: What stands around every text.

        Raises:
            BundleError: The file is no tokenizer.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            # Files often carry the settings of training, such as "cut at 128, pad to 128": they would cut in silence.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = split_special_tokens
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            self.added_tokens = {i: it.content for i, it in self._tokenizer.get_added_tokens_decoder().items()}
            ordinary = set(vocabulary.values()) - self.added_tokens.keys()
            self.largest_id: int = max((*ordinary, *self._tokenizer.encode("").ids), default=0)
            self.special_around = _special_around(self._tokenizer, vocabulary)
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise BundleError(f"{path}: not a tokenizer: {error}") from None
        self.max_token_bytes = max((len(token.encode()) for token in vocabulary), default=0)
        self.template = template
        self._kept_behind = None if template is None else template.after_tokens
        self._pool = pool
        self.max_queue_bytes = max_queue_bytes
        self._queued_bytes = 0  # owned by the event loop

    @property
    def queued_bytes(self) -> int:
        """The text that waits or is worked on, in bytes of UTF-8; any thread may ask."""
        return self._queued_bytes

    async def tokenize(
        self,
        texts: Sequence[str],
        max_tokens: int,
        *,
        truncate: bool,
        details: bool,
        sender: Sender = ANY_SENDER,
    ) -> list[TokenSequence | str]:
        """Tokenizes texts, each cut to `max_tokens`. A few words are tokenized at once; more text waits for a thread.

        Args:
            texts: The texts.
            max_tokens: How many tokens of each are kept.
            truncate: Whether a text may be cut. Otherwise the work ends after the first text that is too long.
            details: Whether to say which tokens are special, and where each begins and ends in the text.
            sender: Whose turn the work waits for.

        Returns:
            For each text its tokens, or what the tokenizer says where it fails; fewer where the work ended early.

        Raises:
            QueueFull: Too much text is waiting already.
            RateLimited: The caller has used up its rate meanwhile.
        """
        size = await _utf8_size(texts)
        if size <= _AT_ONCE_BYTES:
            return _charged(sender, self.tokenize_here(texts, max_tokens, details=details))
        if self._queued_bytes and self._queued_bytes + size > self.max_queue_bytes:
            excess = self._queued_bytes + size - self.max_queue_bytes
            delay_s = min(max(excess / _BYTES_PER_SECOND, 0.05), 5.0)
            raise QueueFull("bytes of text", size, self._queued_bytes, self.max_queue_bytes, delay_s)
        tokenized: list[TokenSequence | str] = []
        self._queued_bytes += size
        try:
            for turn in _turns(texts, _TURN_CHARS):
                work = partial(self.tokenize_here, turn, max_tokens, details=details)
                found = _charged(sender, await self._pool.run(sender, sum(map(len, turn)), work))
                tokenized += found
                if any(isinstance(it, str) or (it.truncated and not truncate) for it in found):
                    break
        finally:
            self._queued_bytes -= size
        return tokenized

    def count_prompt(self, prompt: str) -> int:
        """The tokens of a prompt, those that stand before every text included; as sentence-transformers counts them.

        Raises:
            BundleError: The tokenizer fails for it.
        """
        try:
            special = self._tokenizer.encode(prompt).special_tokens_mask
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise BundleError(f"the tokenizer fails for the prompt {prompt!r}: {error}") from None
        return len(special) - bool(special and special[-1])

    def token_string(self, token_id: int) -> str:
        """The vocabulary's string for an id; empty for an id that the tokenizer does not know."""
        return self._tokenizer.id_to_token(token_id) or ""

    def tokenize_here(self, texts: Sequence[str], max_tokens: int, *, details: bool) -> list[TokenSequence | str]:
        """As `tokenize`, all of it in the caller's thread; any number of threads may call."""
        try:
            # Not `encode`: it keeps Python's lock, and a long text takes a tenth of a second. The fast one leaves out
            # where tokens stand in the text.
            encode = self._tokenizer.encode_batch if details else self._tokenizer.encode_batch_fast
            return [_sequence_of(it, max_tokens, details, self._kept_behind) for it in encode(texts)]
        except BaseException as error:  # of all texts together
            if not _is_failure(error):
                raise
            if len(texts) == 1:
                return [str(error)]
            return [it for text in texts for it in self.tokenize_here([text], max_tokens, details=details)]


def _is_failure(error: BaseException) -> bool:
    """Whether tokenizers failed: it raises plain Exception, and PyO3's PanicException where its Rust code panics.

    That one derives from BaseException and cannot be imported: https://pyo3.rs/main/doc/pyo3/panic/struct.PanicException
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _special_around(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens before the first token of a text, and behind the last; of the first text that has others."""
    for text in ("a", *words):  # without an unk token, only words of the vocabulary are sure to be tokenized
        try:
            encoding = tokenizer.encode(text)
        except BaseException as error:
            if not _is_failure(error):
                raise
            continue
        ids, special = encoding.ids, encoding.special_tokens_mask
        own = [i for i, it in enumerate(special) if not it]
        if own:
            return tuple(ids[: own[0]]), tuple(ids[own[-1] + 1 :])
    return (), ()


def _charged(sender: Sender, found: list[TokenSequence | str]) -> list[TokenSequence | str]:
    """Charge the sender for the tokens of texts, whatever becomes of the call."""
    if sender.charge_text is not None:
        sender.charge_text(sum([len(it.input) for it in found if not isinstance(it, str)]))
    return found


async def _utf8_size(texts: Sequence[str]) -> int:
    """How many bytes texts have; of many MiB others have a turn between."""
    size = 0
    for turn in _turns(texts, _COUNTED_CHARS):
        if size:
            await asyncio.sleep(0)
        size += len("".join(turn).encode())
    return size


def _turns(texts: Sequence[str], most_chars: int) -> Iterator[list[str]]:
    """The texts in runs of at most so many characters, or of one text."""
    turn: list[str] = []
    size = 0
    for text in texts:
        if turn and size + len(text) > most_chars:
            yield turn
            turn, size = [], 0
        turn.append(text)
        size += len(text)
    if turn:
        yield turn


def _sequence_of(encoding: Encoding, max_tokens: int, details: bool, kept_behind: int | None) -> TokenSequence:
    """The tokens of a text; those over `max_tokens` are dropped before the last `kept_behind`.

    Without that number they are dropped from the text's end, before the special tokens behind it.
    """
    ids = encoding.ids
    count = len(ids)
    if count > max_tokens:
        return _cut(encoding, max_tokens, details, kept_behind)
    sequence = TokenSequence(np.array(ids, np.int64), count)
    if details:
        sequence.special = np.array(encoding.special_tokens_mask, np.bool_)
        offsets = encoding.offsets
        sequence.char_starts, sequence.char_ends = [it[0] for it in offsets], [it[1] for it in offsets]
    return sequence


def _cut(encoding: Encoding, max_tokens: int, details: bool, kept_behind: int | None) -> TokenSequence:
    ids, special = encoding.ids, encoding.special_tokens_mask
    count = len(ids)
    closing = kept_behind
    if closing is None:
        closing = next((i for i, it in enumerate(reversed(special)) if not it), count)  # special tokens after the text
    closing = min(closing, max_tokens)
    kept = [*range(max_tokens - closing), *range(count - closing, count)]
    sequence = TokenSequence(np.array([ids[i] for i in kept], np.int64), count, kept_behind=closing)
    if details:
        sequence.special = np.array([special[i] for i in kept], np.bool_)
        offsets = [encoding.token_to_chars(i) or (0, 0) for i in kept]  # all of them would take a long text's time
        sequence.char_starts, sequence.char_ends = [it[0] for it in offsets], [it[1] for it in offsets]
    return sequence
