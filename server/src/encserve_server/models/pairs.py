"""Pairs of texts: the special tokens around both texts, and the cut of a pair that is too long."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from encserve_server.types.arrays import TokenIds
from encserve_server.types.sequences import TokenSequence


@dataclass(slots=True, eq=False)
class SentQuery:
    """The first text of one or many pairs of a call.

    Attributes:
        text: The text.
        ids: (seq,) the token ids of the prompt and the text, without special tokens. None before the first pair was
            tokenized, and for models whose template joins both texts.
    """

    text: str
    ids: TokenIds | None = None


class SentPair(NamedTuple):
    """A pair of texts as the caller sent it. The pairs of one query share the query.

    Attributes:
        query: The first text.
        document: The second text.
        is_joined: Whether the model's template joins both texts, so that the query is tokenized again for each pair.
    """

    query: SentQuery
    document: str
    is_joined: bool = False

    @property
    def size(self) -> int:
        """The number of characters that are tokenized for this pair alone."""
        return len(self.document) + (len(self.query.text) if self.is_joined else 0)


class PairLayout(NamedTuple):
    """The special tokens around the texts of a pair, and the token types.

    Attributes:
        before: The ids before the first text.
        between: The ids between the texts.
        after: The ids after the second text.
        second_type_after: The number of tokens after the end of the first text that still have token type 0. The
            tokens behind them have type 1. None if all tokens have type 0.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    second_type_after: int | None

    @property
    def special_tokens(self) -> int:
        """The number of special tokens of a pair."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: TokenIds, second: TokenIds, kept: tuple[int, int]) -> TokenSequence:
        """Return the tokens of a pair. `kept` is the number of tokens to keep of each text, from its start."""
        parts = (self.before, first[: kept[0]], self.between, second[: kept[1]], self.after)
        ids = np.concatenate([np.asarray(part, np.int64) for part in parts])  # (seq,)
        sequence = TokenSequence(ids, self.special_tokens + len(first) + len(second))
        if self.second_type_after is not None:
            sequence.second_start = len(self.before) + kept[0] + self.second_type_after
        return sequence


def pair_layout(encoding: Encoding) -> PairLayout | None:
    """Return the layout of an encoded pair.

    None if a text of the pair has no token, if the second text does not follow the first, or if the token types are not
    zeros followed by ones.
    """
    ids, texts, types = encoding.ids, encoding.sequence_ids, encoding.type_ids
    first, second = ([i for i, text in enumerate(texts) if text == number] for number in (0, 1))
    if not first or not second or first[-1] > second[0] or sorted(types) != types or not set(types) <= {0, 1}:
        return None
    end = first[-1] + 1
    return PairLayout(
        tuple(ids[: first[0]]),
        tuple(ids[end : second[0]]),
        tuple(ids[second[-1] + 1 :]),
        types.index(1) - end if 1 in types else None,
    )


def kept_tokens(first: int, second: int, room: int, *, cuts_only_second: bool) -> tuple[int, int] | None:
    """Return the number of tokens to keep of each text of a pair, as the tokenizers library cuts pairs.

    Args:
        first: The number of tokens of the first text.
        second: The number of tokens of the second text.
        room: The number of tokens for both texts.
        cuts_only_second: Whether only the second text is cut. Otherwise, the longer text is cut first.

    Returns:
        The numbers; None if only the second text is cut and would lose all of its tokens.
    """
    if first + second <= room:
        return first, second
    if cuts_only_second:
        return (first, room - first) if first < room else None
    shorter = min(first, second)
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def queries_without_ids(pairs: Iterable[SentPair]) -> list[SentQuery]:
    """Return the different queries of pairs that are not tokenized yet."""
    return list({id(pair.query): pair.query for pair in pairs if pair.query.ids is None}.values())
