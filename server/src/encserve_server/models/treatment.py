"""Plans a call: the prompt, the length limit, and the outputs. Without I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from encserve_server.errors import FieldPath, InvalidField, RequestField
from encserve_server.models.inputs import InputChecker, InputRules, LengthLimit, SentInput, is_text
from encserve_server.models.reply_size import ReplyShape
from encserve_server.models.spans import SentSpans
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.outputs import ModelOutputs, OutputPlan, OutputSpec
from encserve_server.types.bundles import Bundle, StaticSparse, TaskSettings
from encserve_server.types.callers import Priority
from encserve_server.types.requests import Detail, OutputKind, Task

# More tokens than any text has.
_ANY_TOKENS = 2**62
_ALL_TOKENS = LengthLimit(_ANY_TOKENS, "")
_PLAIN_SHAPE = ReplyShape()


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """A decoded request, not yet checked against its model.

    Attributes:
        inputs: Texts, pairs of texts, ids, or vectors.
        outputs: The outputs to return. If empty, the reply has a row for each token.
        truncate: Whether an input that is too long is cut instead of refused.
        prompt_name: The name of the prompt before each text; empty for no prompt, None for the prompt of the task or
            the model.
        task: The task of the texts.
        spans: The ranges of OutputKind.SPANS for each input; None for an input without ranges. Empty if no input
            has ranges.
        shape: The format of the reply.
        max_tokens: The maximum number of tokens of an input; 0 for the limit of the model or the task.
        priority: The requested priority.
        closing: If an input of ids is cut, it ends with these ids, such as the id of [SEP].
        document_tokens: The maximum number of tokens of the second text of a pair; 0 for no such limit.
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
    document_tokens: int = 0


class CallPlan(NamedTuple):
    """The plan of a call.

    Attributes:
        checker: Checks the inputs, and tokenizes the texts.
        rules: The rules of the checks.
        plan: The outputs of each sequence.
        detail: The amount of information about each sequence.
        static: The table that answers the call instead of the model; None if the model answers.
    """

    checker: InputChecker
    rules: InputRules
    plan: OutputPlan
    detail: Detail
    static: StaticSparse | None


class CallPlanner:
    """Plans the calls of one model.

    Attributes:
        limits: The length limit for each task, with and without truncation.
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
        """Count the tokens of prompts.

        Args:
            bundle: The model.
            tokenizer: The model's tokenizer, if it has one.
            outputs: The outputs that the model supports.
            max_text_bytes: The maximum size of a text, in bytes of UTF-8.
            static_tokenizers: The tokenizer of the static sparse table of each task. Tasks without such a table are
                absent.

        Raises:
            BundleError: The tokenizer fails for a prompt.
        """
        self._bundle = bundle
        self._tokenizer = tokenizer
        self._outputs = outputs
        least_tokens = 0 if bundle.takes_empty_texts else 1
        self._checker = InputChecker(bundle, tokenizer, max_text_bytes, least_tokens=least_tokens)
        self._static_checkers = {
            task: InputChecker(bundle, own, max_text_bytes, least_tokens=0) for task, own in static_tokenizers.items()
        }
        self._tasks = {task: bundle.treatment(task) for task in (Task.NEITHER, *bundle.tasks)}
        self.limits = {
            (task, truncate): LengthLimit(settings.max_tokens, _limit_name(task, bundle), task, truncate)
            for task, settings in self._tasks.items()
            for truncate in (False, True)
        }
        self._skipped_tokens: dict[str, int] = {}  # by prompt name; empty unless pooling leaves out the prompt
        if tokenizer is not None and bundle.pooling is not None and bundle.pooling.skips_prompt:
            longest = bundle.max_sequence_tokens - 1
            self._skipped_tokens = {
                name: min(tokenizer.count_prompt(text), longest) if text else 0 for name, text in bundle.prompts.items()
            }

    def plan_call(self, call: EncodeCall) -> CallPlan:
        """Plan a call.

        Raises:
            InvalidField: The model does not have an output, a task or a prompt of the call.
            TooManyOutputs: The call asks for too many outputs.
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
        if call.closing or call.document_tokens or 0 < call.max_tokens < limit.tokens:
            limit = _narrowed(limit, call)
        detail = shape.detail or plan.detail
        rules = checker.rules(
            limit,
            details=detail is Detail.TOKENS or bool(call.spans) or shape.without_special,
            prompt=self._bundle.prompts[prompt_name] if prompt_name else "",
            expansion=expansion,
        )
        return CallPlan(checker, rules, plan, detail, static)

    def rules(
        self, inputs: Sequence[SentInput], task: Task, prompt_name: str | None, *, truncate: bool | None
    ) -> tuple[InputChecker, InputRules]:
        """Return the checker and the rules for a reply with details of tokens.

        Args:
            inputs: The inputs.
            task: The task.
            prompt_name: See `EncodeCall`.
            truncate: Whether a text that is too long is cut instead of refused; None accepts any length.

        Raises:
            InvalidField: The model lacks the task or the prompt. Or an input is not a text, and the task or the prompt
                is for texts only.
        """
        settings = self._tasks[task] if task in self._tasks else self._refuse_task(task)
        prompt = self._bundle.prompts.get(self._prompt_name(prompt_name, inputs, task), "")
        limit = _ALL_TOKENS if truncate is None else self.limits[task, truncate]
        return self._checker, self._checker.rules(limit, details=True, prompt=prompt, expansion=settings.expansion)

    def _check_shape(self, call: EncodeCall) -> None:
        """Refuse a format of replies that the model does not support."""
        if call.shape.with_strings and self._tokenizer is None:
            problem = f"model {self._bundle.name} has no tokenizer, so token strings are not available"
            raise InvalidField(FieldPath(RequestField.TOKEN_STRINGS), problem)
        if not call.shape.without_special or self._bundle.special_token_ids:
            return
        if not all(is_text(it) for it in call.inputs):
            problem = f"the special tokens of model {self._bundle.name} are unknown for inputs that are not texts"
            raise InvalidField(FieldPath(RequestField.EXCLUDE_SPECIAL_TOKENS), problem)

    def _refuse_task(self, task: Task) -> TaskSettings:
        """Raise InvalidField for a task that the model does not know."""
        known = tuple(self._bundle.tasks)
        raise InvalidField(
            FieldPath(RequestField.TASK),
            "model {model} does not know {task}; " + ("it knows {known}" if known else "it treats all texts alike"),
            model=self._bundle.name,
            task=task,
            known=known,
        )

    def _prompt_name(self, name: str | None, inputs: Sequence[SentInput], task: Task) -> str:
        """Return the name of the prompt before a call's texts; empty for no prompt.

        Raises:
            InvalidField: The model has no such prompt. Or an input is not a text, but the prompt or task changes texts.
        """
        bundle, settings = self._bundle, self._tasks[task]
        if name and name not in bundle.prompts:
            there = ", ".join(map(repr, bundle.prompts)) or "none"
            problem = f"model {bundle.name} has no prompt {name[:64]!r}; it has {there}"
            raise InvalidField(FieldPath(RequestField.PROMPT_NAME), problem)
        chosen = settings.prompt_name if name is None else name
        if not (name or task):  # the default prompt is for texts only; without it, other inputs are accepted
            return chosen
        changes = ["adds a prompt to texts"] if bundle.prompts.get(chosen) else []
        if task and settings.expansion:
            changes.append("adds tokens to short texts")
        other = _first_not_text(inputs)
        if other is None:
            return chosen
        if name:
            raise InvalidField(
                FieldPath(RequestField.PROMPT_NAME),
                "is for texts only; {other} is not a text: add the ids of the prompt to the input",
                other=FieldPath(RequestField.INPUT, other),
            )
        if changes:
            raise InvalidField(
                FieldPath(RequestField.TASK),
                "{task} {changes}; {other} is not a text: send texts, or no task",
                task=task,
                changes=" and ".join(changes),
                other=FieldPath(RequestField.INPUT, other),
            )
        return chosen

    def _skipped_by(self, prompt_name: str, call: EncodeCall) -> int:
        """Return the number of prompt tokens that pooling leaves out; 0 for most models.

        Raises:
            InvalidField: Only some of the inputs have a prompt.
        """
        skipped = self._skipped_tokens.get(prompt_name, 0)
        if not skipped or all(it.kind is not OutputKind.MODEL for it in call.outputs):
            return 0
        texts = sum(is_text(it) for it in call.inputs)
        if not texts:
            return 0
        if texts < len(call.inputs):
            raise InvalidField(
                FieldPath(RequestField.INPUTS),
                f"must be all texts or all ids: model {self._bundle.name} leaves its prompt out of pooling, and only "
                "texts have a prompt",
            )
        return skipped


def _first_not_text(inputs: Sequence[SentInput]) -> int | None:
    """Return the index of the first input that is not a text; None if all are texts."""
    return next((i for i, it in enumerate(inputs) if not is_text(it)), None)


def _limit_name(task: Task, bundle: Bundle) -> str:
    """Return the name of a task's limit, for errors."""
    if task:
        return f"max_tokens of {{task}} of {bundle.name}"
    return f"{'text.max_tokens' if bundle.max_text_tokens else 'max_sequence_tokens'} of {bundle.name}"


def _narrowed(limit: LengthLimit, call: EncodeCall) -> LengthLimit:
    """Return the limit with the `max_tokens`, `closing` and `document_tokens` of the call."""
    if 0 < call.max_tokens < limit.tokens:
        limit = replace(limit, tokens=call.max_tokens, name="max_tokens")
    return replace(limit, closing=call.closing, document_tokens=call.document_tokens)
