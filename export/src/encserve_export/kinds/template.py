"""Reads a chat template of sentence-transformers: the fixed texts that the template adds before and after a text."""

from typing import Any, Protocol

from encserve_export.core.errors import UnsupportedModelError, first_line
from encserve_export.kinds.spec import TASKS
from encserve_proto.bundle.v1 import manifest_pb2

# Two test strings. They start and end with blanks, to detect a template that strips blanks.
_TEXT, _PROMPT = "  encserve's text \n", "  encserve's prompt \n"
_PAIR = ("  encserve's query \n", "  encserve's document \n")
# Two texts with different token ids. If their rendered messages end with equal tokens, the template added these tokens.
# sentence-transformers uses the same two texts for this purpose.
_FILLERS = ("0", "1 2 3 4")
_ADVICE = (
    "save the model with a template that only adds fixed texts before and after a text. Or serve the model with "
    "sentence-transformers"
)


class TemplateReader(Protocol):
    """Reads the chat template of a Transformer module: `read_template` or `read_pair_template`."""

    def __call__(self, transformer: Any, *, has_prompts: bool) -> manifest_pb2.TextTemplate:
        """Return the fixed texts of the template."""


def read_template(transformer: Any, *, has_prompts: bool) -> manifest_pb2.TextTemplate:
    """Return the fixed texts of the chat template of a Transformer module.

    Args:
        transformer: The module. It renders every text as a chat message.
        has_prompts: Whether the model has prompts, which become system messages.

    Raises:
        UnsupportedModelError: The template does more than put fixed texts around a text and a prompt.
    """
    _check_source(transformer)
    before, after = _around(_render(transformer, _TEXT), _TEXT)
    before_prompt, after_prompt = _around_prompt(transformer, _TEXT, after) if has_prompts else ("", "")
    plain = _ids(transformer, _FILLERS[0])
    if any(_ids(transformer, _FILLERS[0], task=task) != plain for task in TASKS):
        raise UnsupportedModelError("the chat template treats queries and documents differently; " + _ADVICE)
    return manifest_pb2.TextTemplate(
        before=before,
        before_prompt=before_prompt,
        after_prompt=after_prompt,
        after=after,
        after_tokens=_kept_end(transformer, plain, _ids(transformer, _FILLERS[1])),
    )


def read_pair_template(transformer: Any, *, has_prompts: bool) -> manifest_pb2.TextTemplate:
    """Return the fixed texts of the chat template around the two texts of a pair.

    Args:
        transformer: The module. It renders every pair as two chat messages.
        has_prompts: Whether the model has prompts, which become system messages.

    Raises:
        UnsupportedModelError: The template does more than put fixed texts around two texts and a prompt.
    """
    _check_source(transformer)
    before, after_first = _around(_render(transformer, _PAIR), _PAIR[0])
    between, after = _around(after_first, _PAIR[1])
    before_prompt, after_prompt = _around_prompt(transformer, _PAIR, after_first) if has_prompts else ("", "")
    plain, other = (_ids(transformer, (filler, filler)) for filler in _FILLERS)
    return manifest_pb2.TextTemplate(
        before=before,
        before_prompt=before_prompt,
        after_prompt=after_prompt,
        between=between,
        after=after,
        after_tokens=_kept_end(transformer, plain, other),
    )


def _around_prompt(transformer: Any, sent: str | tuple[str, str], after: str) -> tuple[str, str]:
    """Return the fixed texts around a prompt.

    `after` is the text that follows the first text if there is no prompt.

    Raises:
        UnsupportedModelError: A prompt changes the fixed text after the first text.
    """
    start, end = _around(_render(transformer, sent, _PROMPT), sent if isinstance(sent, str) else sent[0])
    around = _around(start, _PROMPT)
    if end != after:
        raise UnsupportedModelError("a prompt changes the end that the chat template adds to a text; " + _ADVICE)
    return around


def _check_source(transformer: Any) -> None:
    try:
        source = transformer.tokenizer.get_chat_template()
    except ValueError as error:
        raise UnsupportedModelError(
            f"the model has several chat templates or none: {first_line(error)}; {_ADVICE}"
        ) from error
    if "strftime_now" in source:
        raise UnsupportedModelError("the chat template writes the date into every text; " + _ADVICE)


def _kept_end(transformer: Any, plain: list[int], other: list[int]) -> int:
    """Return how many tokens of the template stay at the end of a text that is too long and is truncated.

    `plain` and `other` are the ids of two different texts in the template. The template added the equal ids at the end
    of both lists.
    """
    keeps_end = (transformer.processing_kwargs.get("chat_template") or {}).get("restore_suffix", True)
    return _common_end(plain, other) if keeps_end else 0


def _render(transformer: Any, text: str | tuple[str, str], prompt: str = "") -> str:
    """Render a text or a pair with the chat template, as sentence-transformers does. A prompt becomes a system message.

    The content of a message may be a text or a list of parts. This function tries both forms. It returns the first form
    with the same token ids as in sentence-transformers, or else the last form.
    """
    tokenizer = transformer.tokenizer
    settings = {**(transformer.processing_kwargs.get("chat_template") or {})}
    settings.pop("restore_suffix", None)
    said = [("user", text)] if isinstance(text, str) else [("query", text[0]), ("document", text[1])]
    messages = [("system", prompt)] * bool(prompt) + said
    for in_parts in (False, True):
        contents = [[{"type": "text", "text": it}] if in_parts else it for _, it in messages]
        batch = [{"role": role, "content": it} for (role, _), it in zip(messages, contents, strict=True)]
        try:
            rendered: str = tokenizer.apply_chat_template(batch, tokenize=False, **settings)
        except Exception as error:  # a template may raise any exception
            problem = "a prompt, which becomes a system message" if prompt else "a text"
            raise UnsupportedModelError(
                f"the chat template fails for {problem}: {first_line(error)}; {_ADVICE}"
            ) from error
        if tokenizer(rendered, add_special_tokens=False)["input_ids"] == _ids(transformer, text, prompt=prompt or None):
            return rendered
    return rendered


def _around(rendered: str, text: str) -> tuple[str, str]:
    before, _, after = rendered.partition(text)
    if rendered.count(text) != 1 or text.strip() in before + after:
        raise UnsupportedModelError(
            "the chat template changes a text, or writes it several times or not at all: "
            f"{text!r} becomes {rendered[:200]!r}; {_ADVICE}"
        )
    return before, after


def _ids(transformer: Any, text: str | tuple[str, str], **arguments: Any) -> list[int]:
    try:
        ids: list[int] = transformer.preprocess([text], **arguments)["input_ids"][0].tolist()
    except ValueError as error:  # the template has no place for the two texts of a pair
        raise UnsupportedModelError(f"the chat template fails: {first_line(error)}; {_ADVICE}") from error
    return ids


def _common_end(left: list[int], right: list[int]) -> int:
    """Return the number of equal tokens at the end of both sequences."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
