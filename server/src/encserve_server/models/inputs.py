"""The inputs of callers, and the checks that convert inputs to sequences."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from encserve_server.errors import FieldPath, InvalidField, RequestError, RequestField, SequenceTooLong
from encserve_server.models.pairs import SentPair, kept_tokens, queries_without_ids
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.system.background import TURN_BYTES
from encserve_server.types.arrays import TokenIds, Vectors
from encserve_server.types.bundles import Bundle, Expansion
from encserve_server.types.callers import ANY_SENDER, Sender
from encserve_server.types.requests import Task
from encserve_server.types.sequences import TokenSequence

# If the texts of a call have at most this size together, the event loop tokenizes them. That takes 0.1 ms, and a thread
# would add 0.2 ms. The slowest text of this size, random letters without spaces for WordPiece, takes 0.6 ms.
_ON_LOOP_BYTES = 256
# A thread checks and tokenizes a piece of at most this size at a time, in about 5 ms. Between pieces, other callers get
# the thread. If a caller has disconnected, the remaining pieces are dropped.
_TURN_SIZE = 8 * 1024
# A large call is cut into pieces. A piece has at most this number of inputs. The total number of characters, ids and
# vectors is at most TURN_BYTES.
_PIECE_INPUTS = 256
# The largest number of refused inputs that one error names. The check of a call ends at this number.
_MOST_REFUSED = 64


@dataclass(frozen=True, slots=True)
class SentIds:
    """Token ids as the caller sent them.

    Attributes:
        ids: (seq,) int64. Ids beyond the maximum length of the model may be missing.
        count: The number of ids that the caller sent.
    """

    ids: TokenIds
    count: int


@dataclass(frozen=True, slots=True)
class SentVectors:
    """Vectors as the caller sent them.

    Attributes:
        vectors: (seq, width) float32. Vectors beyond the maximum length of the model may be missing.
        count: The number of vectors that the caller sent.
    """

    vectors: Vectors
    count: int


SentInput = str | SentIds | SentVectors | SentPair


def is_text(sent: SentInput) -> bool:
    """Return whether an input is a text or a pair of texts."""
    return isinstance(sent, str | SentPair)


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The maximum length of the sequences of a call.

    Attributes:
        tokens: The maximum number of tokens.
        name: The name of the limit for errors, such as "max_tokens". Errors replace "{task}" by the task.
        task: The task that has the limit.
        truncate: Whether a longer input is cut instead of refused.
        closing: If an input of ids is cut, it ends with these ids, such as the id of [SEP].
        document_tokens: The maximum number of tokens of the second text of a pair; 0 for no such limit. The end of a
            longer text is always cut.
    """

    tokens: int
    name: str
    task: Task = Task.NEITHER
    truncate: bool = False
    closing: tuple[int, ...] = ()
    document_tokens: int = 0


class InputRules(NamedTuple):
    """The rules for the inputs of one call; see `InputChecker.rules`.

    Attributes:
        limit: The limit on the length.
        details: Whether sequences get the offsets of tokens and a mask of special tokens.
        before: The string before every text.
        after: The string after every text.
        expansion: The tokens that are added to every short text.
    """

    limit: LengthLimit
    details: bool
    before: str
    after: str
    expansion: Expansion | None


class Checked(NamedTuple):
    """The result of a check.

    Attributes:
        sequences: The sequences of valid inputs, by the index of the input, in ascending order.
        refused: The errors of all other inputs, by the index of the input, without tracebacks.
        text_tokens: The number of tokens of all texts.
    """

    sequences: dict[int, TokenSequence]
    refused: dict[int, RequestError]
    text_tokens: int


class InputChecker:
    """Checks the inputs of one model, and converts inputs to sequences."""

    def __init__(
        self, bundle: Bundle, tokenizer: TextTokenizer | None, max_text_bytes: int, *, least_tokens: int = 1
    ) -> None:
        """Create a checker.

        Args:
            bundle: The model.
            tokenizer: The model's tokenizer; None without a tokenizer.
            max_text_bytes: The maximum size of a text, in bytes of UTF-8.
            least_tokens: The minimum number of tokens of a text.
        """
        self._bundle = bundle
        self._least_tokens = least_tokens
        self._tokenizer = None if bundle.graph.takes_vectors else tokenizer
        self._template = None if tokenizer is None else tokenizer.template
        self._max_text_bytes = max_text_bytes
        self._is_special = np.isin(np.arange(bundle.vocab_size), bundle.special_token_ids)  # (vocab_size,)
        # Added tokens without a row in the embedding table, such as <image_soft_token> of EmbeddingGemma.
        added = {} if tokenizer is None else tokenizer.added_tokens
        self._without_row = {i: token for i, token in added.items() if i >= bundle.vocab_size}

    def rules(
        self, limit: LengthLimit, *, details: bool = False, prompt: str = "", expansion: Expansion | None = None
    ) -> InputRules:
        """Return the rules of a call.

        Args:
            limit: The limit on the length of the inputs.
            details: Whether sequences get the offsets of tokens and a mask of special tokens.
            prompt: The prompt before every text.
            expansion: The tokens that are added to every short text.
        """
        template = self._template
        before, after = (prompt, "") if template is None else (template.before_text(prompt), template.after)
        return InputRules(limit, details, before, after, expansion)

    async def check(
        self, inputs: Sequence[SentInput], rules: InputRules, sender: Sender = ANY_SENDER
    ) -> list[TokenSequence]:
        """Check inputs and tokenize texts: short texts on the event loop, long texts in threads that senders share.

        The error of the first refused input has the errors of up to 63 other inputs in `RequestError.others`.

        Raises:
            InvalidField: An input is invalid for the model.
            SequenceTooLong: An input is too long, and truncation is off.
            QueueFull: Too much text is waiting.
            RateLimited: The tokens of the texts exceed the caller's rate.
        """
        text_bytes = await self._count_text(inputs, rules)
        if text_bytes <= _ON_LOOP_BYTES or self._tokenizer is None:
            sequences, refused, text_tokens = self.check_now(dict(enumerate(inputs)), rules)
            if text_tokens and sender.charge_text is not None:
                sender.charge_text(text_tokens)
        else:
            sequences, refused = await self._check_in_threads(inputs, rules, sender, text_bytes)
        if refused:
            raise _error_of_all(refused)
        return list(sequences.values())

    async def _check_in_threads(
        self, inputs: Sequence[SentInput], rules: InputRules, sender: Sender, text_bytes: int
    ) -> tuple[dict[int, TokenSequence], dict[int, RequestError]]:
        """Return the sequences of valid inputs, and the errors of refused inputs. Stop early after `_MOST_REFUSED`."""
        assert self._tokenizer is not None  # noqa: S101 - the caller checks this
        sequences: dict[int, TokenSequence] = {}
        refused: dict[int, RequestError] = {}
        around = len(rules.before) + len(rules.after)
        with self._tokenizer.hold_bytes(text_bytes):
            for begin, end in pieces(inputs, _TURN_SIZE, around):
                piece = {at: inputs[at] for at in range(begin, end)}
                cost = sum([_size(it, around) for it in piece.values()])
                work = partial(self.check_now, piece, rules)
                checked = await self._tokenizer.pool.run(sender, cost, work)
                if sender.charge_text is not None:
                    sender.charge_text(checked.text_tokens)
                sequences |= checked.sequences
                refused |= checked.refused
                if len(refused) >= _MOST_REFUSED:
                    break
        return sequences, refused

    def check_now(self, inputs: Mapping[int, SentInput], rules: InputRules) -> Checked:
        """Check inputs and tokenize texts in the calling thread. Several threads may do this at the same time.

        Args:
            inputs: The inputs by index, in ascending order.
            rules: The rules of the call.
        """
        sequences: dict[int, TokenSequence] = {}
        refused: dict[int, RequestError] = {}
        texts: dict[int, str] = {}
        pairs: dict[int, SentPair] = {}
        text_tokens = 0
        for at, sent in inputs.items():
            try:
                if isinstance(sent, str) and not self._bundle.graph.takes_vectors:
                    self._check_text(at, sent)
                    texts[at] = rules.before + sent + rules.after
                elif isinstance(sent, SentPair):
                    pairs[at] = self._check_pair(at, sent)
                else:
                    sequences[at] = self._check_numbers(at, sent, rules)
            except RequestError as error:
                refused[at] = error.with_traceback(None)
        if texts and self._tokenizer is not None:
            is_mixed = bool(sequences)
            tokenized = self._tokenizer.tokenize(list(texts.values()), rules.limit.tokens, details=rules.details)
            text_tokens = sum([len(it.input) for it in tokenized if not isinstance(it, str)])
            for (at, text), tokens in zip(texts.items(), tokenized, strict=True):
                try:
                    sequences[at] = self._check_tokens(at, text, tokens, rules)
                except RequestError as error:
                    refused[at] = error.with_traceback(None)
            if is_mixed:
                sequences = dict(sorted(sequences.items()))
        if pairs:
            found = self._tokenize_pairs(pairs, rules)
            text_tokens += sum(len(it.input) for it in found.sequences.values())
            sequences = dict(sorted((sequences | found.sequences).items()))
            refused |= found.refused
        return Checked(sequences, refused, text_tokens)

    async def _count_text(self, inputs: Sequence[SentInput], rules: InputRules) -> int:
        """Return the size of all texts in bytes of UTF-8, including the strings before and after every text.

        Raises:
            InvalidField: A text is too long. Nothing is tokenized then.
        """
        if self._tokenizer is None:
            return 0
        around_bytes = len((rules.before + rules.after).encode())
        text_bytes = counted_chars = 0
        queries: set[int] = set()  # `id()` of each query that is already counted
        refused: dict[int, RequestError] = {}
        for at, sent in enumerate(inputs):
            texts: tuple[str, ...] = (sent,) if isinstance(sent, str) else ()
            if isinstance(sent, SentPair):
                is_counted = id(sent.query) in queries and not sent.is_joined
                if not is_counted:
                    self._check_query(at, sent.query.text)
                    queries.add(id(sent.query))
                texts = (sent.document,) if is_counted else (sent.query.text, sent.document)
            for text in texts:
                if counted_chars > TURN_BYTES:
                    counted_chars = 0
                    await asyncio.sleep(0)
                counted_chars += len(text)
                size = len(text.encode("utf-8", "surrogatepass"))
                if size > self._max_text_bytes:
                    refused[at] = too_many_bytes(FieldPath(RequestField.TEXT, at), self._max_text_bytes, size)
                text_bytes += size
            text_bytes += around_bytes if texts else 0
        if refused:
            raise _error_of_all(refused)
        return text_bytes

    def _check_text(self, at: int, text: str) -> None:
        """Check a text before it is tokenized."""
        if self._tokenizer is None:
            raise InvalidField(
                FieldPath(RequestField.TEXT, at), f"model {self._bundle.name} has no tokenizer; send token ids"
            )
        if self._template is not None and self._template.between is not None:
            raise InvalidField(
                FieldPath(RequestField.TEXT, at),
                f"model {self._bundle.name} takes pairs of texts only: send a query and documents",
            )
        self._check_bytes(FieldPath(RequestField.TEXT, at), text)

    def _check_pair(self, at: int, pair: SentPair) -> SentPair:
        """Check the texts of a pair before they are tokenized. The query is checked once."""
        if pair.query.ids is None:
            self._check_query(at, pair.query.text)
        self._check_bytes(FieldPath(RequestField.TEXT, at), pair.document)
        return pair

    def _check_query(self, at: int, query: str) -> None:
        """Check that the model takes pairs, and check the query of a pair before it is tokenized."""
        tokenizer, template = self._tokenizer, self._template
        layout = None if tokenizer is None else tokenizer.pair if template is None else template.between
        if layout is None:
            raise InvalidField(
                FieldPath(RequestField.TEXT, at), f"model {self._bundle.name} cannot tokenize pairs of texts"
            )
        self._check_bytes(FieldPath(RequestField.QUERY, at), query)

    def _check_bytes(self, field: FieldPath, text: str) -> None:
        most = self._max_text_bytes
        # A character has at most 4 bytes, so most texts need no exact count.
        if len(text) * 4 > most and (size := len(text.encode("utf-8", "surrogatepass"))) > most:
            raise too_many_bytes(field, most, size)

    def _tokenize_pairs(self, pairs: Mapping[int, SentPair], rules: InputRules) -> Checked:
        """Tokenize pairs of texts. The result has no number of text tokens."""
        tokenizer, template = self._tokenizer, self._template
        assert tokenizer is not None  # noqa: S101 - `_check_query` has checked this
        most = rules.limit.document_tokens or None
        joined: dict[int, TokenSequence | str | RequestError] = {}
        dropped: dict[int, int] = {}  # the tokens that `document_tokens` has cut; 1 if the number is unknown
        if template is not None:
            # The template joins both texts to one text, whose end is cut.
            around = rules.before, template.between or "", rules.after
            documents = [it.document for it in pairs.values()]
            if most is not None:
                documents = tokenizer.cut_texts(documents, most)
                shorter = zip(pairs.items(), documents, strict=True)
                dropped = {at: 1 for (at, it), document in shorter if document != it.document}
            texts = [
                f"{around[0]}{it.query.text}{around[1]}{document}{around[2]}"
                for it, document in zip(pairs.values(), documents, strict=True)
            ]
            joined.update(zip(pairs, tokenizer.tokenize(texts, rules.limit.tokens, details=False), strict=True))
        else:
            failures = self._tokenize_queries(tokenizer, pairs.values(), rules)
            found = tokenizer.tokenize_plain([it.document for it in pairs.values()])
            for (at, pair), ids in zip(pairs.items(), found, strict=True):
                if pair.query.ids is None:
                    problem = failures[id(pair.query)]
                    joined[at] = self._tokenizer_error(FieldPath(RequestField.QUERY, at), problem)
                elif isinstance(ids, str):
                    joined[at] = ids
                else:
                    joined[at] = self._join(at, pair.query.ids, ids[:most], rules)
                    dropped[at] = len(ids[most:]) if most is not None else 0
        sequences: dict[int, TokenSequence] = {}
        refused: dict[int, RequestError] = {}
        plain = rules._replace(details=False)
        for at, tokens in joined.items():
            try:
                if isinstance(tokens, RequestError):
                    raise tokens
                sequences[at] = self._check_tokens(at, "", tokens, plain)
                sequences[at].original_token_count += dropped.get(at, 0)
            except RequestError as error:
                refused[at] = error.with_traceback(None)
        return Checked(sequences, refused, 0)

    def _tokenize_queries(
        self, tokenizer: TextTokenizer, pairs: Iterable[SentPair], rules: InputRules
    ) -> dict[int, str]:
        """Set the ids of the different queries of pairs. Return the tokenizer's errors, by the id of the query."""
        failures: dict[int, str] = {}
        queries = queries_without_ids(pairs)
        found = tokenizer.tokenize_plain([rules.before + it.text for it in queries]) if queries else []
        for query, ids in zip(queries, found, strict=True):
            if isinstance(ids, str):
                failures[id(query)] = ids
            else:
                query.ids = ids
        return failures

    def _join(self, at: int, first: TokenIds, second: TokenIds, rules: InputRules) -> TokenSequence | RequestError:
        """Cut the texts of a pair if they are too long, and add the special tokens."""
        layout = None if self._tokenizer is None else self._tokenizer.pair
        assert layout is not None  # noqa: S101 - `_check_query` has checked this
        scores = self._bundle.scores
        room = rules.limit.tokens - layout.special_tokens
        cuts_only_second = scores is not None and scores.cuts_only_second
        kept = kept_tokens(len(first), len(second), room, cuts_only_second=cuts_only_second) if room > 0 else None
        if kept is None:
            return SequenceTooLong(
                FieldPath(RequestField.QUERY, at),
                "must leave room for the document: a pair has at most {limit} tokens (" + rules.limit.name + "), with "
                "{special} special tokens; the query has {count}",
                limit=rules.limit.tokens,
                special=layout.special_tokens,
                count=len(first),
                task=rules.limit.task,
            )
        return layout.join(first, second, kept)

    def _check_tokens(self, at: int, text: str, tokens: TokenSequence | str, rules: InputRules) -> TokenSequence:
        """Check the tokens of a text, and add the details and the expansion.

        Args:
            at: The index of the input.
            text: The text, including the strings before and after it.
            tokens: The tokens, or the text of the tokenizer's error.
            rules: The rules of the call.

        Raises:
            InvalidField: The tokenizer failed, the text has no tokens, or the model has no row for a token.
            SequenceTooLong: The text has too many tokens, and truncation is off.
        """
        if isinstance(tokens, str):
            raise self._tokenizer_error(FieldPath(RequestField.TEXT, at), tokens)
        if len(tokens.input) < self._least_tokens:
            raise InvalidField(FieldPath(RequestField.TEXT, at), "has no tokens")
        if self._without_row:
            self._check_rows(at, tokens)
        if tokens.original_token_count > rules.limit.tokens:
            check_length(FieldPath(RequestField.TEXT, at), tokens.original_token_count, rules.limit)
        if rules.details and self._template is not None:
            _mark_template(tokens, len(rules.before), len(text) - len(rules.after))
        if rules.details and rules.before:
            _leave_prompt_out(tokens, len(rules.before))
        if rules.expansion is not None:
            _expand(tokens, rules.expansion)
        return tokens

    def _tokenizer_error(self, field: FieldPath, problem: str) -> InvalidField:
        return InvalidField(
            field,
            "the tokenizer of {model} fails: {problem}. The vocabulary lacks a part of the text: remove that part, or "
            "export the model with an unk token in tokenizer.json",
            model=self._bundle.name,
            problem=problem,
        )

    def _check_rows(self, at: int, tokens: TokenSequence) -> None:
        """Refuse a text with an added token that is beyond the embedding table of the model."""
        token_id = int(tokens.input.max(initial=0))
        if token_id >= self._bundle.vocab_size:
            raise InvalidField(
                FieldPath(RequestField.TEXT, at),
                f"holds {self._without_row[token_id]!r}, token {token_id}; the vocabulary of {self._bundle.name} ends "
                f"at {self._bundle.vocab_size - 1}: remove that token",
            )

    def _check_numbers(self, at: int, sent: SentInput, rules: InputRules) -> TokenSequence:
        """Check ids and vectors, and refuse a text if the model takes vectors."""
        if isinstance(sent, SentVectors):
            return self._check_vectors(at, sent, rules.limit)
        if self._bundle.graph.takes_vectors:
            field = RequestField.TEXT if is_text(sent) else RequestField.IDS
            raise InvalidField(FieldPath(field, at), f"model {self._bundle.name} takes embeddings only")
        assert isinstance(sent, SentIds)  # noqa: S101 - the caller handles texts
        return self._check_ids(at, sent, rules.limit, rules.details)

    def _check_ids(self, at: int, sent: SentIds, limit: LengthLimit, details: bool) -> TokenSequence:
        if sent.count == 0:
            raise InvalidField(FieldPath(RequestField.IDS, at), "must hold at least 1 id; was empty")
        check_length(FieldPath(RequestField.IDS, at), sent.count, limit)
        ids = sent.ids[: limit.tokens]  # (seq,)
        if limit.closing and sent.count > limit.tokens:
            closing = np.array(limit.closing[-limit.tokens :], np.int64)
            ids = np.concatenate([ids[: limit.tokens - len(closing)], closing])
        # One comparison checks both bounds: as unsigned integers, negative ids are the largest.
        if int(ids.view(np.uint64).max()) >= self._bundle.vocab_size:
            place = int(np.argmax((ids < 0) | (ids >= self._bundle.vocab_size)))
            raise InvalidField(
                FieldPath(RequestField.IDS, at, place),
                f"must be from 0 to {self._bundle.vocab_size - 1} (the vocabulary of {self._bundle.name}); "
                f"was {ids[place]}",
            )
        return TokenSequence(ids, sent.count, self._is_special[ids] if details else None)

    def _check_vectors(self, at: int, sent: SentVectors, limit: LengthLimit) -> TokenSequence:
        bundle, field = self._bundle, FieldPath(RequestField.VECTORS, at)
        if not bundle.graph.takes_vectors:
            kinds = "token ids or text" if self._tokenizer is not None else "token ids"
            raise InvalidField(field, f"model {bundle.name} takes {kinds}; the model was not exported for embeddings")
        if sent.vectors.shape[1] != bundle.d_model:
            raise InvalidField(
                FieldPath(RequestField.VECTORS_WIDTH, at),
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
                FieldPath(RequestField.VECTORS_DATA, at),
                f"must be finite; was {vectors[row, column]} in row {row}, column {column}",
            )
        return TokenSequence(vectors, sent.count)


def _error_of_all(refused: dict[int, RequestError]) -> RequestError:
    """Remove and return the error of the first refused input. The error gets the errors of the other inputs.

    The removal avoids a reference cycle: error, traceback, frame, `refused`. The cycle would keep inputs in memory.
    """
    first = refused.pop(min(refused))
    first.others = [refused[at] for at in sorted(refused)[: _MOST_REFUSED - 1]]
    return first


def first_piece(inputs: Sequence[SentInput]) -> int:
    """Return the exclusive end index of the first piece of a call; see `pieces`."""
    return 1 if len(inputs) == 1 else next(pieces(inputs))[1]


def pieces(inputs: Sequence[SentInput], most_size: int = TURN_BYTES, around: int = 0) -> Iterator[tuple[int, int]]:
    """Cut inputs into pieces that are prepared one at a time. Most calls have one piece.

    Args:
        inputs: At least one input.
        most_size: The maximum size of a piece: the total number of characters, ids and vectors. An input above this
            size is a separate piece.
        around: The number of characters that are added to every text.

    Yields:
        The start index and the exclusive end index of each piece.
    """
    begin = size = 0
    for i, it in enumerate(inputs):
        its_size = len(it) + around if isinstance(it, str) else _size(it, around)
        if i > begin and (size + its_size > most_size or i - begin == _PIECE_INPUTS):
            yield begin, i
            begin, size = i, 0
        size += its_size
    yield begin, len(inputs)


def _size(sent: SentInput, around: int) -> int:
    if isinstance(sent, str):
        return len(sent) + around
    if isinstance(sent, SentPair):
        return sent.size + around
    return len(sent.ids) if isinstance(sent, SentIds) else len(sent.vectors)


def too_many_bytes(field: FieldPath | str, limit: int, size: int) -> InvalidField:
    """Return the error of a text that is larger than `max_text_bytes`."""
    return InvalidField(field, f"must be at most {limit} bytes (max_text_bytes); was {size}")


def check_length(field: FieldPath, count: int, limit: LengthLimit) -> None:
    """Raise SequenceTooLong if an input has more tokens than the limit, unless long inputs are cut."""
    if count > limit.tokens and not limit.truncate:
        raise SequenceTooLong(
            field,
            "must be at most {limit} tokens (" + limit.name + "); was {count}. Set truncate, or split the input",
            limit=limit.tokens,
            count=count,
            task=limit.task,
        )


def _expand(sequence: TokenSequence, expansion: Expansion) -> None:
    """Add special tokens to the end of a short sequence."""
    count = len(sequence.input)
    added = expansion.min_tokens - count
    if added <= 0:
        return
    sequence.input = np.concatenate([sequence.input, np.full(added, expansion.token_id)])
    sequence.original_token_count += added
    sequence.kept_after = 0
    sequence.attended = 0 if expansion.attended else count
    if sequence.special is not None:
        sequence.special = np.concatenate([sequence.special, np.ones(added, np.bool_)])
    if sequence.char_starts is not None and sequence.char_ends is not None:
        sequence.char_starts += [0] * added
        sequence.char_ends += [0] * added


def _mark_template(sequence: TokenSequence, text_start: int, text_end: int) -> None:
    """Mark the tokens of the template as special, and set their offsets to 0."""
    if sequence.char_starts is None or sequence.char_ends is None:
        return
    starts, ends = np.array(sequence.char_starts, np.int64), np.array(sequence.char_ends, np.int64)  # (seq,)
    outside = (ends <= text_start) | (starts >= text_end)  # (seq,)
    sequence.special = outside if sequence.special is None else sequence.special | outside
    sequence.char_starts = np.where(outside, 0, starts).tolist()
    sequence.char_ends = np.where(outside, 0, np.minimum(ends, text_end)).tolist()


def _leave_prompt_out(sequence: TokenSequence, prompt_chars: int) -> None:
    """Change offsets to count from the end of the prompt. The tokens of the prompt begin and end at 0."""
    if sequence.char_starts is not None and sequence.char_ends is not None:
        sequence.char_starts = [max(start - prompt_chars, 0) for start in sequence.char_starts]
        sequence.char_ends = [max(end - prompt_chars, 0) for end in sequence.char_ends]
