"""Text to token ids with the bundle's own tokenizer, off the event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from encserve_server.errors import BundleError
from encserve_server.types import TokenizedText


class TextTokenizer:
    """A tokenizer.json, used as it was trained but without the truncation and padding baked into the file."""

    def __init__(self, path: Path, executor: Executor) -> None:
        """Loads the file; `executor` is where the work is done.

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
        self._executor = executor

    async def tokenize(self, texts: Sequence[str], max_tokens: int) -> list[TokenizedText]:
        """Tokenizes texts, each cut to `max_tokens`; whether that was allowed is for the caller to judge."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._tokenize, texts, max_tokens)

    def token_string(self, token_id: int) -> str:
        """The vocabulary's string for an id; empty for an id that the tokenizer does not know."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _tokenize(self, texts: Sequence[str], max_tokens: int) -> list[TokenizedText]:
        # One call for all texts; tokenizers releases the GIL and spreads a batch over threads.
        return [_cut(encoding, max_tokens) for encoding in self._tokenizer.encode_batch(list(texts))]


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
