"""How a model treats a call: what goes around its texts, how long they may be, what is made of them. Pure decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from encserve_server.errors import FieldPath, InvalidField, Part
from encserve_server.models.inputs import InputChecker, InputRules, LengthLimit, SentInput
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.spans import SentSpans
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.outputs import ModelOutputs, OutputPlan, OutputSpec
from encserve_server.types.bundles import Bundle, StaticSparse, TaskSettings
from encserve_server.types.callers import Priority
from encserve_server.types.requests import Detail, OutputKind, Task

# A bound that no text reaches.
_ANY_TOKENS = 2**62
_ALL_TOKENS = LengthLimit(_ANY_TOKENS, "")
_PLAIN_SHAPE = ReplyShape()


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One request, decoded but not checked against its model.

    Attributes:
        inputs: Texts, ids, or vectors.
        outputs: What to return; empty for the rows of tokens.
        truncate: Whether an over-long input is cut instead of refused.
        prompt_name: What to put before every text; empty for nothing, None for what the task, or the model, has.
        task: What the texts are.
        spans: For each input what OutputKind.SPANS has rows for, None for nothing; or nothing for all.
        shape: How the reply is to be written.
        max_tokens: The most tokens of an input; 0 for as many as the model, or the task, takes.
        priority: How urgent it says it is.
        closing: What all ids end with, and keep where they are cut.
        part_of: All inputs of the call, where these are a part of them.
    """

    inputs: Sequence[SentInput]
    outputs: tuple[OutputSpec, ...]
    truncate: bool = False
    prompt_name: str | None = None
    task: Task = Task.NEITHER
    spans: Sequence[SentSpans | None] = ()
    shape: ReplyShape = _PLAIN_SHAPE
    max_tokens: int = 0
    priority: Priority = Priority.INTERACTIVE
    closing: tuple[int, ...] = ()
    part_of: Sequence[SentInput] = ()


class Treatment(NamedTuple):
    """What is to be done with a call.

    Attributes:
        checker: What checks its inputs, and has the tokenizer of its texts.
        rules: How they are checked.
        plan: What is made of each.
        detail: How much the reply says of each sequence.
        static: What answers the call in place of the model, if anything does.
    """

    checker: InputChecker
    rules: InputRules
    plan: OutputPlan
    detail: Detail
    static: StaticSparse | None


class Treatments:
    """How one model treats calls.

    Attributes:
        limits: The longest sequence of each task that the model knows, by whether a longer one is cut.
    """

    limits: Mapping[tuple[Task, bool], LengthLimit]

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: TextTokenizer | None,
        outputs: ModelOutputs,
        max_text_bytes: int,
        static_tokenizers: Mapping[Task, TextTokenizer],
    ) -> None:
        """Takes the parts of a model, and the longest text in bytes of UTF-8.

        Raises:
            BundleError: The tokenizer fails for a prompt.
        """
        self._bundle = bundle
        self._tokenizer = tokenizer
        self._outputs = outputs
        least_tokens = 0 if bundle.takes_empty_texts else 1
        self._checker = InputChecker(bundle, tokenizer, max_text_bytes, least_tokens=least_tokens)
        self._static_checkers = {
            task: InputChecker(bundle, its, max_text_bytes, least_tokens=0) for task, its in static_tokenizers.items()
        }
        self._tasks = {task: bundle.treatment(task) for task in (Task.NEITHER, *bundle.tasks)}
        self.limits = {
            (task, truncate): LengthLimit(settings.max_tokens, _limit_name(task, bundle), task, truncate)
            for task, settings in self._tasks.items()
            for truncate in (False, True)
        }
        self._skipped_tokens: dict[str, int] = {}  # of each prompt, where it is left out of pooling
        if tokenizer is not None and bundle.pooling is not None and bundle.pooling.skips_prompt:
            longest = bundle.max_sequence_tokens - 1
            self._skipped_tokens = {
                name: min(tokenizer.count_prompt(text), longest) if text else 0 for name, text in bundle.prompts.items()
            }

    def treat(self, call: EncodeCall) -> Treatment:
        """What is to be done with a call.

        Raises:
            InvalidField: The model does not have what the call asks for.
            TooManyOutputs: It asks for too many outputs.
        """
        shape, task, inputs = call.shape, call.task, call.inputs
        if shape.with_strings or shape.without_special:
            self._check_shape(call)
        settings = self._tasks[task] if task in self._tasks else self._refuse_task(task)
        prompt_name = self._prompt_name(call.prompt_name, inputs, task)
        skipped = self._skipped_by(prompt_name, call) if self._skipped_tokens else 0
        plan = self._outputs.plan(call.outputs, task, skipped)
        checker, limit, expansion, static = self._checker, self.limits[task, call.truncate], settings.expansion, None
        if self._static_checkers:
            static = self._outputs.static(plan.outputs, task, _first_not_text(inputs))
        if static is not None:
            checker, expansion = self._static_checkers[task], None
            limit = LengthLimit(static.max_tokens or _ANY_TOKENS, "static_sparse.max_tokens", task, call.truncate)
        if call.closing or 0 < call.max_tokens < limit.tokens:
            limit = _narrowed(limit, call)
        detail = shape.detail or plan.detail
        rules = checker.rules(
            limit,
            details=detail is Detail.TOKENS or bool(call.spans) or shape.without_special,
            prompt=self._bundle.prompts[prompt_name] if prompt_name else "",
            expansion=expansion,
        )
        return Treatment(checker, rules, plan, detail, static)

    def rules(
        self, inputs: Sequence[SentInput], task: Task, prompt_name: str | None, *, truncate: bool | None
    ) -> tuple[InputChecker, InputRules]:
        """How inputs are checked whose tokens are told in detail; `truncate` is None to take texts of any length.

        Raises:
            InvalidField: The model does not know the task or the prompt, or they are not for these inputs.
        """
        settings = self._tasks[task] if task in self._tasks else self._refuse_task(task)
        prompt = self._bundle.prompts.get(self._prompt_name(prompt_name, inputs, task), "")
        limit = _ALL_TOKENS if truncate is None else self.limits[task, truncate]
        return self._checker, self._checker.rules(limit, details=True, prompt=prompt, expansion=settings.expansion)

    def _check_shape(self, call: EncodeCall) -> None:
        """Refuses what the reply cannot say."""
        if call.shape.with_strings and self._tokenizer is None:
            problem = f"model {self._bundle.name} has no tokenizer, so no strings for its ids"
            raise InvalidField(FieldPath(Part.TOKEN_STRINGS), problem)
        if not call.shape.without_special or self._bundle.special_token_ids:
            return
        if not all(isinstance(it, str) for it in call.inputs):
            problem = f"model {self._bundle.name} does not say which tokens are special"
            raise InvalidField(FieldPath(Part.EXCLUDE_SPECIAL_TOKENS), problem)

    def _refuse_task(self, task: Task) -> TaskSettings:
        """Refuses a task that the model does not know."""
        known = tuple(self._bundle.tasks)
        raise InvalidField(
            FieldPath(Part.TASK),
            "model {model} does not know {task}; " + ("it knows {known}" if known else "it treats all texts alike"),
            model=self._bundle.name,
            task=task,
            known=known,
        )

    def _prompt_name(self, name: str | None, inputs: Sequence[SentInput], task: Task) -> str:
        """The prompt that a call's texts get; empty for none.

        Raises:
            InvalidField: The model has no such prompt, or there are inputs that prompt or task would change, and which
                are no texts.
        """
        bundle, settings = self._bundle, self._tasks[task]
        if name and name not in bundle.prompts:
            there = ", ".join(map(repr, bundle.prompts)) or "none"
            problem = f"model {bundle.name} has no prompt {name[:64]!r}; it has {there}"
            raise InvalidField(FieldPath(Part.PROMPT_NAME), problem)
        chosen = settings.prompt_name if name is None else name
        if not (name or task):  # without being asked, a prompt goes before the texts, and other inputs stay as they are
            return chosen
        changes = ["puts a prompt before texts"] if bundle.prompts.get(chosen) else []
        if task and settings.expansion:
            changes.append("puts tokens behind short texts")
        other = _first_not_text(inputs)
        if other is None:
            return chosen
        if name:
            raise InvalidField(
                FieldPath(Part.PROMPT_NAME),
                "goes before texts only; {other} is not a text: put it among its ids",
                other=FieldPath(Part.INPUT, other),
            )
        if changes:
            raise InvalidField(
                FieldPath(Part.TASK),
                "{task} {changes}; {other} is not a text: send text, or leave the task out",
                task=task,
                changes=" and ".join(changes),
                other=FieldPath(Part.INPUT, other),
            )
        return chosen

    def _skipped_by(self, prompt_name: str, call: EncodeCall) -> int:
        """How many tokens of a prompt are left out of pooling, for a model that was trained so.

        Raises:
            InvalidField: Only some of the inputs have a prompt.
        """
        skipped = self._skipped_tokens.get(prompt_name, 0)
        if not skipped or all(it.kind is not OutputKind.MODEL for it in call.outputs):
            return 0
        inputs = call.part_of or call.inputs
        texts = sum(isinstance(it, str) for it in inputs)
        if not texts:
            return 0
        if texts < len(inputs):
            raise InvalidField(
                FieldPath(Part.INPUTS),
                f"must be texts, or else sequences of ids, in one call: model {self._bundle.name} leaves its prompt "
                "out of pooling, and only texts have one",
            )
        return skipped


def _first_not_text(inputs: Sequence[SentInput]) -> int | None:
    """The place of the first input that is not a text; None where all are."""
    return next((i for i, it in enumerate(inputs) if not isinstance(it, str)), None)


def _limit_name(task: Task, bundle: Bundle) -> str:
    """What bounds the texts of a task, for errors."""
    if task:
        return f"max_tokens of {{task}} of {bundle.name}"
    return f"{'text.max_tokens' if bundle.max_text_tokens else 'max_sequence_tokens'} of {bundle.name}"


def _narrowed(limit: LengthLimit, call: EncodeCall) -> LengthLimit:
    """A limit with what the call itself says of it."""
    if 0 < call.max_tokens < limit.tokens:
        limit = replace(limit, tokens=call.max_tokens, name="max_tokens")
    return replace(limit, closing=call.closing)
