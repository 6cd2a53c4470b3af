"""Inputs as callers send them, and the checks that make sequences of them. Knows no gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from encserve_server.errors import InvalidField, SequenceTooLong
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.types import Bundle, CheckedSequence, Expansion, TokenIds, TokenizedText, Vectors


@dataclass(frozen=True, slots=True)
class SentIds:
    """Ids as the caller sent them.

    Attributes:
        ids: (seq,) int64, as many as the model can take.
        count: How many there were.
    """

    ids: TokenIds
    count: int


@dataclass(frozen=True, slots=True)
class SentVectors:
    """Vectors as the caller sent them.

    Attributes:
        vectors: (seq, width) float32, as many as the model can take.
        count: How many there were.
    """

    vectors: Vectors
    count: int


SentInput = str | SentIds | SentVectors


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest sequence that a call may hold.

    Attributes:
        tokens: Its tokens, at most what the model can take.
        name: Where the bound comes from, for errors.
        truncate: Whether a longer input is cut instead of refused.
    """

    tokens: int
    name: str
    truncate: bool


class InputChecker:
    """Turns a model's inputs into sequences that it can take, or names the first that it cannot."""

    def __init__(
        self, bundle: Bundle, tokenizer: TextTokenizer | None, max_text_bytes: int, *, least_tokens: int = 1
    ) -> None:
        """Takes the model, its tokenizer, the longest text in bytes of UTF-8, and how few tokens one may have."""
        self._bundle = bundle
        self._least_tokens = least_tokens
        self._tokenizer = tokenizer
        self._max_text_bytes = max_text_bytes
        self._special_ids = np.array(bundle.special_token_ids, np.int64)

    async def check(
        self,
        inputs: Sequence[SentInput],
        fields: Sequence[str],
        longest: Longest,
        *,
        mark_special: bool = False,
        prompt: str = "",
        expansion: Expansion | None = None,
    ) -> list[CheckedSequence]:
        """Checks inputs, and tokenizes texts.

        Args:
            inputs: The inputs.
            fields: The path of each in the request, for errors.
            longest: The bound on their length.
            mark_special: Whether ids are to be told from special ones; of texts they always are.
            prompt: What is put before every text.
            expansion: What is put behind every short one.

        Raises:
            InvalidField: An input is not what the model takes.
            SequenceTooLong: One is too long, and may not be cut.
            QueueFull: Too much text is waiting.
        """
        texts: dict[int, str] = {}
        checked: dict[int, CheckedSequence] = {}
        for i, (it, field) in enumerate(zip(inputs, fields, strict=True)):
            if isinstance(it, SentVectors):
                checked[i] = self._check_vectors(f"{field}.embeddings", it, longest)
            elif self._bundle.graph.takes_vectors:
                kind = "text" if isinstance(it, str) else "token_ids"
                raise InvalidField(f"{field}.{kind}", f"model {self._bundle.name} takes embeddings only")
            elif isinstance(it, str):
                self._check_text(f"{field}.text", it)
                texts[i] = it
            else:
                checked[i] = self._check_ids(f"{field}.token_ids", it, longest, mark_special)
        if texts:
            paths = [f"{fields[i]}.text" for i in texts]
            tokenized = await self._tokenize(list(texts.values()), paths, longest, prompt, expansion)
            checked |= zip(texts, tokenized, strict=True)
        return [checked[i] for i in range(len(inputs))]

    async def tokenize(
        self,
        texts: Sequence[str],
        fields: Sequence[str],
        longest: Longest,
        *,
        prompt: str = "",
        expansion: Expansion | None = None,
    ) -> list[CheckedSequence]:
        """Checks texts and tokenizes them; the arguments, and what it raises, are those of `check`."""
        for text, field in zip(texts, fields, strict=True):
            self._check_text(field, text)
        return await self._tokenize(texts, fields, longest, prompt, expansion)

    async def _tokenize(
        self, texts: Sequence[str], fields: Sequence[str], longest: Longest, prompt: str, expansion: Expansion | None
    ) -> list[CheckedSequence]:
        """Tokenizes texts that `_check_text` lets through."""
        checked: list[CheckedSequence] = []

        def take(text: TokenizedText | str) -> None:
            field = fields[len(checked)]
            if isinstance(text, str):
                raise InvalidField(
                    field,
                    f"the tokenizer of {self._bundle.name} fails for it: {text}. Its vocabulary lacks something of it: "
                    "leave that out, or have the model exported with an unk token in its tokenizer.json",
                )
            its = _without_prompt(text, len(prompt)) if prompt else text
            sequence = self._check_tokenized(field, its, longest)
            checked.append(_expanded(sequence, its, expansion) if expansion else sequence)

        assert self._tokenizer is not None  # noqa: S101 - `_check_text` lets no text through without one
        await self._tokenizer.tokenize([prompt + it for it in texts], longest.tokens, take)
        return checked

    def _check_text(self, field: str, text: str) -> None:
        if self._tokenizer is None:
            raise InvalidField(field, f"model {self._bundle.name} has no tokenizer; send token_ids")
        limit = self._max_text_bytes
        # A code point has at most 4 bytes, so most texts need no encoding to be known short enough.
        if len(text) * 4 > limit and (size := len(text.encode())) > limit:
            raise InvalidField(field, f"must be at most {limit} bytes (max_text_bytes); was {size}")

    def _check_tokenized(self, field: str, text: TokenizedText, longest: Longest) -> CheckedSequence:
        if len(text.ids) < self._least_tokens:
            raise InvalidField(field, "has no tokens")
        self._check_length(field, text.original_token_count, longest)
        return CheckedSequence(text.ids, text.original_token_count, text.special, text)

    def _check_ids(self, field: str, sent: SentIds, longest: Longest, mark_special: bool) -> CheckedSequence:
        if sent.count == 0:
            raise InvalidField(field, "must hold at least 1 id; was empty")
        self._check_length(field, sent.count, longest)
        ids = sent.ids[: longest.tokens]  # (seq,)
        # One pass for both bounds: read without their sign, numbers below 0 are the largest.
        if int(ids.view(np.uint64).max()) >= self._bundle.vocab_size:
            at = int(np.argmax((ids < 0) | (ids >= self._bundle.vocab_size)))
            raise InvalidField(
                f"{field}.ids[{at}]",
                f"must be from 0 to {self._bundle.vocab_size - 1} (the vocabulary of {self._bundle.name}); "
                f"was {ids[at]}",
            )
        return CheckedSequence(ids, sent.count, np.isin(ids, self._special_ids) if mark_special else None)

    def _check_vectors(self, field: str, sent: SentVectors, longest: Longest) -> CheckedSequence:
        bundle = self._bundle
        if not bundle.graph.takes_vectors:
            kinds = "token_ids or text" if self._tokenizer is not None else "token_ids"
            raise InvalidField(field, f"model {bundle.name} takes {kinds}; it was not exported for embeddings")
        if sent.vectors.shape[1] != bundle.d_model:
            raise InvalidField(
                f"{field}.width", f"must be {bundle.d_model} (d_model of {bundle.name}); was {sent.vectors.shape[1]}"
            )
        if sent.count == 0:
            raise InvalidField(field, "must hold at least 1 vector; was empty")
        self._check_length(field, sent.count, longest)
        vectors = sent.vectors[: longest.tokens]  # (seq, d_model)
        finite = np.isfinite(vectors)  # (seq, d_model)
        if not finite.all():
            row, column = np.unravel_index(int(np.argmin(finite)), finite.shape)
            raise InvalidField(
                f"{field}.data", f"must be finite; was {vectors[row, column]} in row {row}, column {column}"
            )
        return CheckedSequence(vectors, sent.count)

    def _check_length(self, field: str, count: int, longest: Longest) -> None:
        if count > longest.tokens and not longest.truncate:
            raise SequenceTooLong(
                field,
                f"must be at most {longest.tokens} tokens ({longest.name}); was {count}. "
                "Ask for truncation, or cut it up",
            )


def _expanded(sequence: CheckedSequence, text: TokenizedText, expansion: Expansion) -> CheckedSequence:
    """A short sequence with tokens behind its last one; they are special ones."""
    count, added = len(text.ids), expansion.min_tokens - len(text.ids)
    if added <= 0:
        return sequence
    longer = TokenizedText(
        ids=np.concatenate([text.ids, np.full(added, expansion.token_id)]),
        char_starts=text.char_starts + [0] * added,
        char_ends=text.char_ends + [0] * added,
        special=np.concatenate([text.special, np.ones(added, np.bool_)]),
        original_token_count=text.original_token_count + added,
    )
    attended = 0 if expansion.attended else count
    return CheckedSequence(longer.ids, longer.original_token_count, longer.special, longer, attended)


def _without_prompt(text: TokenizedText, prompt_chars: int) -> TokenizedText:
    """The same tokens, placed in the text alone: those of the prompt begin and end at 0."""
    return replace(
        text,
        char_starts=[max(start - prompt_chars, 0) for start in text.char_starts],
        char_ends=[max(end - prompt_chars, 0) for end in text.char_ends],
    )
