"""Chat templates, with which sentence-transformers renders texts as messages, as fixed texts around a text."""

from typing import Any

from encserve_export.ground.errors import UnsupportedModelError, first_line
from encserve_export.kinds.recipe import TASKS
from encserve_proto.bundle.v1 import manifest_pb2

# Blanks at both ends, which a template may strip.
_TEXT, _PROMPT = "  encserve's text \n", "  encserve's prompt \n"
_FILLERS = ("0", "1 2 3 4")  # as sentence-transformers finds the tokens behind a text that a cut leaves
_ADVICE = (
    "save the model with a template that puts fixed texts around a text and takes out nothing, or serve it with "
    "sentence-transformers"
)


def read_template(transformer: Any, *, has_prompts: bool) -> manifest_pb2.TextTemplate:
    """The effect of the chat template of a Transformer module that renders every text as a message.

    Args:
        transformer: The module.
        has_prompts: Whether the model has prompts, which become system messages.

    Raises:
        UnsupportedModelError: The template does more than to put fixed texts around a text and a prompt.
    """
    tokenizer = transformer.tokenizer
    if transformer.processor is not tokenizer:
        raise UnsupportedModelError("texts are rendered as messages by a processor of more than text; " + _ADVICE)
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:
        raise UnsupportedModelError(f"there is no one chat template: {first_line(error)}; {_ADVICE}") from error
    if "strftime_now" in source:
        raise UnsupportedModelError("the chat template writes the date of the day into every text; " + _ADVICE)
    before, after = _parts(_render(transformer, ""), _TEXT)
    before_prompt = after_prompt = ""
    if has_prompts:
        start, end = _parts(_render(transformer, _PROMPT), _TEXT)
        before_prompt, after_prompt = _parts(start, _PROMPT)
        if end != after:
            raise UnsupportedModelError("the chat template ends otherwise where there is a prompt; " + _ADVICE)
    plain = _ids(transformer, _FILLERS[0])
    if any(_ids(transformer, _FILLERS[0], task=task) != plain for task in TASKS):
        raise UnsupportedModelError("the chat template treats queries and documents differently; " + _ADVICE)
    return manifest_pb2.TextTemplate(
        before=before,
        before_prompt=before_prompt,
        after_prompt=after_prompt,
        after=after,
        after_tokens=_common_end(plain, _ids(transformer, _FILLERS[1])) if _settings(transformer)[1] else 0,
    )


def _settings(transformer: Any) -> tuple[dict[str, Any], bool]:
    """What the template is rendered with, and whether a cut leaves the tokens behind the text."""
    settings = dict(transformer.processing_kwargs.get("chat_template") or {})
    return settings, bool(settings.pop("restore_suffix", True))


def _render(transformer: Any, prompt: str) -> str:
    formatter = transformer.input_formatter
    _, inputs = formatter.batch_to_message("text", {"text": [_TEXT]})
    messages = inputs["message"]
    if prompt:
        messages = formatter.prepend_prompt_to_messages(messages, prompt)
    try:
        rendered: str = transformer.tokenizer.apply_chat_template(
            messages[0], tokenize=False, **_settings(transformer)[0]
        )
    except Exception as error:  # whatever a template raises
        what = "a prompt, which becomes a system message" if prompt else "a text"
        raise UnsupportedModelError(f"the chat template fails for {what}: {first_line(error)}; {_ADVICE}") from error
    return rendered


def _parts(rendered: str, text: str) -> tuple[str, str]:
    before, _, after = rendered.partition(text)
    if rendered.count(text) != 1 or text.strip() in before + after:
        raise UnsupportedModelError(
            "the chat template changes a text or writes it several times or not at all: "
            f"{text!r} becomes {rendered[:200]!r}; {_ADVICE}"
        )
    return before, after


def _ids(transformer: Any, text: str, **arguments: Any) -> list[int]:
    ids: list[int] = transformer.preprocess([text], **arguments)["input_ids"][0].tolist()
    return ids


def _common_end(left: list[int], right: list[int]) -> int:
    """How many tokens at the end of two sequences are the same."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
