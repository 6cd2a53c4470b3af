"""Reads a chat template of sentence-transformers: the fixed texts that the template adds before and after a text."""

from typing import Any

from encserve_export.core.errors import UnsupportedModelError, first_line
from encserve_export.kinds.spec import TASKS
from encserve_proto.bundle.v1 import manifest_pb2

# Two test strings. They start and end with blanks, to detect a template that strips blanks.
_TEXT, _PROMPT = "  encserve's text \n", "  encserve's prompt \n"
# Two texts with different token ids. If their rendered messages end with equal tokens, the template added these tokens.
# sentence-transformers uses the same two texts for this purpose.
_FILLERS = ("0", "1 2 3 4")
_ADVICE = (
    "save the model with a template that puts fixed texts around an unchanged text, or serve it with "
    "sentence-transformers"
)


def read_template(transformer: Any, *, has_prompts: bool) -> manifest_pb2.TextTemplate:
    """Return the fixed texts of the chat template of a Transformer module.

    Args:
        transformer: The module. It renders every text as a chat message.
        has_prompts: Whether the model has prompts, which become system messages.

    Raises:
        UnsupportedModelError: The template does more than put fixed texts around a text and a prompt.
    """
    try:
        source = transformer.tokenizer.get_chat_template()
    except ValueError as error:
        raise UnsupportedModelError(
            f"the model has several chat templates or none: {first_line(error)}; {_ADVICE}"
        ) from error
    if "strftime_now" in source:
        raise UnsupportedModelError("the chat template writes the date into every text; " + _ADVICE)
    before, after = _around(_render(transformer, _TEXT), _TEXT)
    before_prompt = after_prompt = ""
    if has_prompts:
        start, end = _around(_render(transformer, _TEXT, _PROMPT), _TEXT)
        before_prompt, after_prompt = _around(start, _PROMPT)
        if end != after:
            raise UnsupportedModelError("the chat template ends differently after a prompt; " + _ADVICE)
    plain = _ids(transformer, _FILLERS[0])
    if any(_ids(transformer, _FILLERS[0], task=task) != plain for task in TASKS):
        raise UnsupportedModelError("the chat template treats queries and documents differently; " + _ADVICE)
    keeps_end = (transformer.processing_kwargs.get("chat_template") or {}).get("restore_suffix", True)
    return manifest_pb2.TextTemplate(
        before=before,
        before_prompt=before_prompt,
        after_prompt=after_prompt,
        after=after,
        after_tokens=_common_end(plain, _ids(transformer, _FILLERS[1])) if keeps_end else 0,
    )


def _render(transformer: Any, text: str, prompt: str = "") -> str:
    """Return the text of the chat message that sentence-transformers makes of a text and a prompt.

    The content of a message may be a text or a list of parts. This function tries both forms. It returns the first form
    with the same token ids as in sentence-transformers, or else the last form.
    """
    tokenizer = transformer.tokenizer
    settings = {**(transformer.processing_kwargs.get("chat_template") or {})}
    settings.pop("restore_suffix", None)
    messages = [("system", prompt)] * bool(prompt) + [("user", text)]
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


def _ids(transformer: Any, text: str, **arguments: Any) -> list[int]:
    ids: list[int] = transformer.preprocess([text], **arguments)["input_ids"][0].tolist()
    return ids


def _common_end(left: list[int], right: list[int]) -> int:
    """Return the number of equal tokens at the end of both sequences."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
