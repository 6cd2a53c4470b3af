"""Inputs as callers send them, and the checks that make sequences of them. Knows no gRPC."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from encserve_server.errors import FieldPath, InvalidField, Part, RequestError, SequenceTooLong
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.types.arrays import TokenIds, Vectors
from encserve_server.types.bundles import Bundle, Expansion
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.requests import Task
from encserve_server.types.sequences import TokenSequence

# Others have a turn after a longer text: its bytes are counted, which takes 0.2 ms of 64 KiB.
_TURN_CHARS = 64 * 1024
# So much text, in characters, or so many ids and inputs are checked and tokenized at a time.
_PIECE_SIZE, _PIECE_INPUTS = 64 * 1024, 256


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
class LengthLimit:
    """The longest sequence that a call may hold.

    Attributes:
        tokens: The tokens, at most what the model can take.
        name: Where the bound comes from, for errors; `{task}` in it stands for the task.
        task: The task whose bound it is.
        truncate: Whether a longer input is cut instead of refused.
        closing: What all ids of the call end with, and keep where they are cut.
    """

    tokens: int
    name: str
    task: Task = Task.NEITHER
    truncate: bool = False
    closing: tuple[int, ...] = ()


class InputRules(NamedTuple):
    """How the inputs of one call are checked; see `InputChecker.rules`.

    Attributes:
        limit: The bound on their length.
        details: Whether special tokens are to be told from others, and of texts where each token stands.
        before: What is put before every text.
        behind: What is put behind every text.
        expansion: What is put behind every short text, once it has been tokenized.
    """

    limit: LengthLimit
    details: bool
    before: str
    behind: str
    expansion: Expansion | None


class InputChecker:
    """Turns a model's inputs into sequences that it can take, or names the first that it cannot."""

    def __init__(
        self, bundle: Bundle, tokenizer: TextTokenizer | None, max_text_bytes: int, *, least_tokens: int = 1
    ) -> None:
        """Takes the model, its tokenizer, the longest text in bytes of UTF-8, and how few tokens one may have."""
        self._bundle = bundle
        self._least_tokens = least_tokens
        self._tokenizer = tokenizer
        self._template = None if tokenizer is None else tokenizer.template
        self._max_text_bytes = max_text_bytes
        self._special_ids = np.array(bundle.special_token_ids, np.int64)
        # Added tokens without a row in the model's table, such as <image_soft_token> of EmbeddingGemma.
        added = {} if tokenizer is None else tokenizer.added_tokens
        self._without_row = {i: token for i, token in added.items() if i >= bundle.vocab_size}

    def rules(
        self, limit: LengthLimit, *, details: bool = False, prompt: str = "", expansion: Expansion | None = None
    ) -> InputRules:
        """The rules of a call.

        Args:
            limit: The bound on the length of its inputs.
            details: Whether special tokens are to be told from others, and of texts where each token stands.
            prompt: What is put before every text.
            expansion: What is put behind every short text.
        """
        template = self._template
        before, behind = (prompt, "") if template is None else (template.before_text(prompt), template.after)
        return InputRules(limit, details, before, behind, expansion)

    async def check(
        self, inputs: Sequence[SentInput], rules: InputRules, sender: Sender = ANY_SENDER
    ) -> list[TokenSequence]:
        """Checks inputs, and tokenizes texts when the sender's turn comes.

        Raises:
            InvalidField: An input is not what the model takes.
            SequenceTooLong: One is too long, and may not be cut.
            QueueFull: Too much text is waiting.
        """
        texts: dict[int, str] = {}
        checked: dict[int, TokenSequence] = {}
        for i, sent in enumerate(inputs):
            begun = self.begin(i, sent, rules)
            if isinstance(begun, str):
                texts[i] = begun
                if len(begun) > _TURN_CHARS:
                    await asyncio.sleep(0)
            else:
                checked[i] = begun
        if texts and self._tokenizer is not None:
            limit = rules.limit
            tokenized = await self._tokenizer.tokenize(
                list(texts.values()), limit.tokens, truncate=limit.truncate, details=rules.details, sender=sender
            )
            for (i, text), found in zip(texts.items(), tokenized, strict=False):  # fewer where one is refused
                checked[i] = self.finish(i, text, found, rules)
        if texts and len(texts) < len(inputs):
            return [checked[i] for i in range(len(inputs))]
        return list(checked.values())

    def check_here(self, inputs: Sequence[SentInput], rules: InputRules) -> list[TokenSequence | RequestError]:
        """Checks inputs, and tokenizes texts in the caller's thread; any number of threads may call.

        Returns:
            For each input its sequence, or why it is refused, as `check` would raise it.
        """
        checked: list[TokenSequence | RequestError | None] = [None] * len(inputs)
        texts: dict[int, str] = {}
        for i, sent in enumerate(inputs):
            try:
                begun = self.begin(i, sent, rules)
            except RequestError as error:
                checked[i] = error
                continue
            if isinstance(begun, str):
                texts[i] = begun
            else:
                checked[i] = begun
        if texts and self._tokenizer is not None:
            tokenized = self._tokenizer.tokenize_here(list(texts.values()), rules.limit.tokens, details=rules.details)
            for (i, text), found in zip(texts.items(), tokenized, strict=True):
                try:
                    checked[i] = self.finish(i, text, found, rules)
                except RequestError as error:
                    checked[i] = error
        return [it for it in checked if it is not None]

    def begin(self, at: int, sent: SentInput, rules: InputRules) -> str | TokenSequence:
        """Checks an input as far as it can be without a tokenizer.

        Returns:
            The sequence, or of a text what is to be tokenized.

        Raises:
            InvalidField: The input is not what the model takes.
            SequenceTooLong: It is too long, and may not be cut.
        """
        if not isinstance(sent, str) or self._bundle.graph.takes_vectors:
            return self._check_numbers(at, sent, rules)
        if self._tokenizer is None:
            raise InvalidField(FieldPath(Part.TEXT, at), f"model {self._bundle.name} has no tokenizer; send token ids")
        most = self._max_text_bytes
        # A code point has at most 4 bytes, so most texts need no encoding to be known short enough.
        if len(sent) * 4 > most and (size := len(sent.encode(errors="surrogatepass"))) > most:
            raise InvalidField(FieldPath(Part.TEXT, at), f"must be at most {most} bytes (max_text_bytes); was {size}")
        return rules.before + sent + rules.behind

    def finish(self, at: int, text: str, found: TokenSequence | str, rules: InputRules) -> TokenSequence:
        """Checks what the tokenizer made of a text.

        Args:
            at: Its place in the call.
            text: What was tokenized, as `begin` gave it.
            found: Its tokens, or what the tokenizer says where it fails.
            rules: The rules of the call.

        Raises:
            InvalidField: The tokenizer fails, there are no tokens, or the model has no row for a token.
            SequenceTooLong: There are too many, and the text may not be cut.
        """
        if isinstance(found, str):
            raise InvalidField(
                FieldPath(Part.TEXT, at),
                "the tokenizer of {model} fails for it: {problem}. Its vocabulary lacks something of it: leave that "
                "out, or have the model exported with an unk token in its tokenizer.json",
                model=self._bundle.name,
                problem=found,
            )
        if len(found.input) < self._least_tokens:
            raise InvalidField(FieldPath(Part.TEXT, at), "has no tokens")
        if self._without_row:
            self._check_rows(at, found)
        if found.original_token_count > rules.limit.tokens:
            check_length(FieldPath(Part.TEXT, at), found.original_token_count, rules.limit)
        if rules.details and self._template is not None:
            _mark_template(found, len(rules.before), len(text) - len(rules.behind))
        if rules.details and rules.before:
            _leave_prompt_out(found, len(rules.before))
        if rules.expansion is not None:
            _expand(found, rules.expansion)
        return found

    def _check_rows(self, at: int, found: TokenSequence) -> None:
        """Refuse a text with an added token that the model has no row for."""
        token_id = int(found.input.max(initial=0))
        if token_id >= self._bundle.vocab_size:
            raise InvalidField(
                FieldPath(Part.TEXT, at),
                f"holds {self._without_row[token_id]!r}, token {token_id}; the vocabulary of {self._bundle.name} ends "
                f"at {self._bundle.vocab_size - 1}: leave that token out",
            )

    def _check_numbers(self, at: int, sent: SentInput, rules: InputRules) -> TokenSequence:
        """Checks an input that is no text for this model."""
        if isinstance(sent, SentVectors):
            return self._check_vectors(at, sent, rules.limit)
        if self._bundle.graph.takes_vectors:
            part = Part.TEXT if isinstance(sent, str) else Part.IDS
            raise InvalidField(FieldPath(part, at), f"model {self._bundle.name} takes embeddings only")
        assert isinstance(sent, SentIds)  # noqa: S101 - texts have been taken
        return self._check_ids(at, sent, rules.limit, rules.details)

    def _check_ids(self, at: int, sent: SentIds, limit: LengthLimit, details: bool) -> TokenSequence:
        if sent.count == 0:
            raise InvalidField(FieldPath(Part.IDS, at), "must hold at least 1 id; was empty")
        check_length(FieldPath(Part.IDS, at), sent.count, limit)
        ids = sent.ids[: limit.tokens]  # (seq,)
        if limit.closing and sent.count > limit.tokens:
            closing = np.array(limit.closing[-limit.tokens :], np.int64)
            ids = np.concatenate([ids[: limit.tokens - len(closing)], closing])
        # One pass for both bounds: read without their sign, numbers below 0 are the largest.
        if int(ids.view(np.uint64).max()) >= self._bundle.vocab_size:
            place = int(np.argmax((ids < 0) | (ids >= self._bundle.vocab_size)))
            raise InvalidField(
                FieldPath(Part.IDS, at, place),
                f"must be from 0 to {self._bundle.vocab_size - 1} (the vocabulary of {self._bundle.name}); "
                f"was {ids[place]}",
            )
        return TokenSequence(ids, sent.count, np.isin(ids, self._special_ids) if details else None)

    def _check_vectors(self, at: int, sent: SentVectors, limit: LengthLimit) -> TokenSequence:
        bundle, field = self._bundle, FieldPath(Part.VECTORS, at)
        if not bundle.graph.takes_vectors:
            kinds = "token ids or text" if self._tokenizer is not None else "token ids"
            raise InvalidField(field, f"model {bundle.name} takes {kinds}; it was not exported for embeddings")
        if sent.vectors.shape[1] != bundle.d_model:
            raise InvalidField(
                FieldPath(Part.VECTORS_WIDTH, at),
                f"must be {bundle.d_model} (d_model of {bundle.name}); was {sent.vectors.shape[1]}",
            )
        if sent.count == 0:
            raise InvalidField(field, "must hold at least 1 vector; was empty")
        check_length(field, sent.count, limit)
        vectors = sent.vectors[: limit.tokens]  # (seq, d_model)
        finite = np.isfinite(vectors)  # (seq, d_model)
        if not finite.all():
            row, column = np.unravel_index(int(np.argmin(finite)), finite.shape)
            raise InvalidField(
                FieldPath(Part.VECTORS_DATA, at),
                f"must be finite; was {vectors[row, column]} in row {row}, column {column}",
            )
        return TokenSequence(vectors, sent.count)


def pieces(inputs: Sequence[SentInput]) -> Iterator[tuple[int, int]]:
    """The begin and the end of runs of inputs that are prepared at a time; of a usual call there is one."""
    begin = size = 0
    for i, it in enumerate(inputs):
        its_size = len(it) if isinstance(it, str) else len(it.ids) if isinstance(it, SentIds) else len(it.vectors)
        if i > begin and (size + its_size > _PIECE_SIZE or i - begin == _PIECE_INPUTS):
            yield begin, i
            begin, size = i, 0
        size += its_size
    yield begin, len(inputs)


def check_length(field: FieldPath, count: int, limit: LengthLimit) -> None:
    """Raises SequenceTooLong for an input of more tokens than the limit, unless it is to be cut."""
    if count > limit.tokens and not limit.truncate:
        raise SequenceTooLong(
            field,
            "must be at most {limit} tokens (" + limit.name + "); was {count}. Set truncate, or split it",
            limit=limit.tokens,
            count=count,
            task=limit.task,
        )


def _expand(sequence: TokenSequence, expansion: Expansion) -> None:
    """Puts tokens behind the last one of a short sequence; they are special ones."""
    count = len(sequence.input)
    added = expansion.min_tokens - count
    if added <= 0:
        return
    sequence.input = np.concatenate([sequence.input, np.full(added, expansion.token_id)])
    sequence.original_token_count += added
    sequence.kept_behind = 0
    sequence.attended = 0 if expansion.attended else count
    if sequence.special is not None:
        sequence.special = np.concatenate([sequence.special, np.ones(added, np.bool_)])
    if sequence.char_starts is not None and sequence.char_ends is not None:
        sequence.char_starts += [0] * added
        sequence.char_ends += [0] * added


def _mark_template(sequence: TokenSequence, text_start: int, text_end: int) -> None:
    """Counts the tokens that stand wholly before or behind the text among the special ones, which have no place."""
    if sequence.char_starts is None or sequence.char_ends is None:
        return
    starts, ends = np.array(sequence.char_starts, np.int64), np.array(sequence.char_ends, np.int64)  # (seq,)
    outside = (ends <= text_start) | (starts >= text_end)  # (seq,)
    sequence.special = outside if sequence.special is None else sequence.special | outside
    sequence.char_starts = np.where(outside, 0, starts).tolist()
    sequence.char_ends = np.where(outside, 0, np.minimum(ends, text_end)).tolist()


def _leave_prompt_out(sequence: TokenSequence, prompt_chars: int) -> None:
    """Counts places from the end of the prompt: its tokens begin and end at 0."""
    if sequence.char_starts is not None and sequence.char_ends is not None:
        sequence.char_starts = [max(start - prompt_chars, 0) for start in sequence.char_starts]
        sequence.char_ends = [max(end - prompt_chars, 0) for end in sequence.char_ends]
