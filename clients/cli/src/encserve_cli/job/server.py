"""The encoders that use a server: for vectors, and for scores of pairs."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from encserve_cli.files.encoding import REFUSALS, with_sent_ids
from encserve_cli.files.reading import PAIR_COLUMNS
from encserve_cli.files.rows import Value
from encserve_cli.files.writing import RAGGED
from encserve_cli.job.plan import MakeOptions, ModelFacts
from encserve_cli.job.run import LocalWorker
from encserve_cli.job.types import BatchProgress, Encoded, Stopped
from encserve_client import (
    Block,
    EncodedOutput,
    EncoderClient,
    EncodeResult,
    EncserveError,
    FingerprintError,
    InferenceError,
    InvalidRequestError,
    ModelInfo,
    ServerError,
    ServerUnavailableError,
    Timings,
)
from encserve_client.inputs import pack_input
from encserve_client.options import Options
from encserve_proto.v1 import encoder_pb2 as pb

logger = logging.getLogger(__name__)

# The errors of a server that died during a message. A server that refuses a message gives a reason.
_CRASHES = (ServerUnavailableError, ServerError)
_CRASH_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
_PROBE_INPUTS = 32  # small, so that a probe is fast; large enough to find one of 2,048 inputs with few probes
_PROBE_SECONDS = 60.0  # the longest time of a probe, and of a restart of the server
_SERVE_AGAIN = "serve the old version again, or run the command again, for a job with --overwrite"
_MOST_CRASHING = 4  # if more inputs of one block make the server die, the server itself is broken


class ServerEncoder(ABC):
    """Encodes through a client. Several threads may use an encoder at the same time.

    The encoder finds and refuses an input that makes the server die. During the search no other thread sends inputs, so
    only the inputs of the search can make the server die.
    """

    def __init__(self, client: EncoderClient, info: ModelInfo) -> None:
        """`info` describes the model. The caller closes the client."""
        self._client = client
        self._info = info
        self._n_running = 0
        self._may_begin = threading.Condition()
        self._stopped = False  # not an Event: a signal handler may call `stop`, and must not wait for a lock

    @abstractmethod
    def check(self) -> None:
        """Check that the model has the output, before a plan is made or parts are removed.

        Raises:
            InvalidRequestError: The model lacks the output, the task or the prompt. The message lists allowed values.
        """

    @abstractmethod
    def _encode(self, values: Sequence[Any], on_batch: BatchProgress) -> Encoded:
        """Encode values with calls that may fail because the server dies."""

    @abstractmethod
    def _probe(self, values: Sequence[Any]) -> tuple[str, Message]:
        """Return the name of an RPC, and a request with all values."""

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """See `Encoder`.

        Raises:
            ValueError: The server has replaced the bundle since the encoder was opened.
        """
        with self._together():
            try:
                return self._encode(values, on_batch)
            except _CRASHES as error:
                if error.reason:
                    raise
                problem = str(error)
        with self._alone():
            self._wait_for_server()
            logger.warning(
                "the server failed for %d inputs: %s; sending small groups, to find the input at fault",
                len(values),
                problem,
            )
            refused = self._crashing(values)
            good = [index for index in range(len(values)) if index not in refused]
            # The call that crashed has already reported rows to `on_batch`. So this call reports only tokens.
            encoded = Encoded(None, {})
            if good:
                encoded = self._encode([values[index] for index in good], lambda _, tokens: on_batch(0, tokens))
        return Encoded(encoded.result, refused | {good[index]: error for index, error in encoded.refused.items()})

    def _crashing(self, values: Sequence[Value]) -> dict[int, EncserveError]:
        """Return the inputs that make the server die, by index. Each of them was sent alone.

        The function sends small groups of inputs. If the server dies for a group, the function divides the group.

        Raises:
            EncserveError: The server does not come back, or dies for too many inputs.
        """
        found: dict[int, EncserveError] = {}
        indices = list(range(len(values)))
        groups = [indices[first : first + _PROBE_INPUTS] for first in range(0, len(values), _PROBE_INPUTS)]
        while groups:
            self._check_running()
            self._wait_for_server()
            group = groups.pop()
            problem = self._crash([values[index] for index in group])
            if problem and len(group) > 1:
                half = len(group) // 2
                groups += [group[:half], group[half:]]
            elif problem:
                found[group[0]] = InferenceError(f"makes the server fail each time: {problem}")
            if len(found) > _MOST_CRASHING:
                raise ServerError(f"the server fails for at least {len(found)} inputs, each sent alone: {problem}")
        return found

    def _wait_for_server(self) -> None:
        """Raise an EncserveError if the server does not answer within the time of a restart."""
        self._client.models(timeout_seconds=_PROBE_SECONDS)

    def _crash(self, values: Sequence[Value]) -> str:
        """Send inputs once. Return the problem if the server dies, and "" if the server answers or refuses."""
        method, request = self._probe(values)
        try:
            self._client.raw_method(method)(request.SerializeToString(), timeout=_PROBE_SECONDS)
        except grpc.RpcError as error:
            trailers: Any = error.trailing_metadata() or ()
            if error.code() in _CRASH_CODES and "encserve-error-reason" not in dict(trailers):
                return error.details() or error.code().name
        return ""

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Run the `with` block, also while other threads run such blocks."""
        with self._may_begin:
            self._n_running += 1
        try:
            yield
        finally:
            with self._may_begin:
                self._n_running -= 1
                self._may_begin.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other thread runs a `with` block of `_together`. Then run this `with` block alone."""
        with self._may_begin:
            self._may_begin.wait_for(lambda: not self._n_running)
            yield

    def _counter(self, on_batch: BatchProgress) -> Callable[[int], None]:
        """Return a function that reports rows. The argument is the number of finished rows of one `_encode`."""
        counted = 0

        def count(done: int) -> None:
            nonlocal counted
            self._check_running()  # `count` is called after failed attempts too
            on_batch(max(done - counted, 0), 0)
            counted = max(done, counted)

        return count

    def _check_running(self) -> None:
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """See `Encoder`."""
        self._stopped = True

    close = stop  # the caller closes the client


class VectorEncoder(ServerEncoder):
    """Computes vectors through a client."""

    def __init__(
        self, client: EncoderClient, info: ModelInfo, make: MakeOptions, *, include_token_strings: bool = False
    ) -> None:
        """`info` is the model; `make` is the output of each value. The caller closes the client."""
        super().__init__(client, info)
        options = Options(
            (make.output,),
            make.dtype,
            make.truncate,
            make.exclude_special,
            include_token_strings,
            make.prompt_name,
            make.task,
        )
        self._template = pb.EncodeRequest(model=info.name, model_version=info.version, options=options.to_proto())
        self._run = partial(
            client.run,
            outputs=options.outputs,
            model=info.name,
            version=info.version,
            dtype=make.dtype,
            truncate=make.truncate,
            exclude_special_tokens=make.exclude_special,
            include_token_strings=include_token_strings,
            prompt_name=make.prompt_name,
            task=make.task,
        )

    def check(self) -> None:
        """See `ServerEncoder`."""
        self._run([])

    def _probe(self, values: Sequence[Any]) -> tuple[str, Message]:
        request = pb.EncodeRequest(inputs=[pack_input(value, "inputs") for value in values])
        request.MergeFrom(self._template)
        return "Encode", request

    def _encode(self, values: Sequence[Any], on_batch: BatchProgress) -> Encoded:
        count = self._counter(on_batch)
        # A message with inputs of similar length needs less padding in the batches of the server.
        order = sorted(range(len(values)), key=lambda index: len(values[index]))
        inputs = [values[index] for index in order]
        result = self._run(inputs, progress=lambda n, _: count(n))
        for error in result.errors.values():
            if not isinstance(error, REFUSALS):  # the input itself is not the cause
                raise error
        if result.fingerprint != self._info.fingerprint:
            raise ValueError(
                f"the server has replaced the bundle {self._info.fingerprint} by {result.fingerprint}; {_SERVE_AGAIN}"
            )
        on_batch(0, sum(it.token_count for it in result.sequences))
        if isinstance(inputs[0], list):
            result = with_sent_ids(result, inputs)
        refused = {order[index]: error for index, error in result.errors.items()}
        return Encoded(_in_order(result, order) if len(refused) < len(values) else None, refused)


class ScoreEncoder(ServerEncoder):
    """Computes the scores of pairs of texts through a client."""

    def __init__(self, client: EncoderClient, info: ModelInfo, make: MakeOptions) -> None:
        """`info` is the model; `make` has the options of the scores. The caller closes the client."""
        super().__init__(client, info)
        self._template = pb.ScoreRequest(model=info.name, model_version=info.version, prompt_name=make.prompt_name)
        self._score = partial(
            client.score,
            activation=make.activation,
            truncate=make.truncate,
            prompt_name=make.prompt_name,
            model=info.name,
            version=info.version,
            expected_fingerprint=info.fingerprint,
        )

    def check(self) -> None:
        """See `ServerEncoder`. The server checks the options of a call only with a pair."""
        self._score([("a", "a")])  # some models refuse an empty text, because it has no tokens

    def _probe(self, values: Sequence[Any]) -> tuple[str, Message]:
        request = pb.ScoreRequest(pairs=[pb.TextPair(query=query, document=document) for query, document in values])
        request.MergeFrom(self._template)
        return "Score", request

    def _encode(self, values: Sequence[Any], on_batch: BatchProgress) -> Encoded:
        count = self._counter(on_batch)
        found: dict[int, Any] = {}  # index of a pair → (labels,)
        refused: dict[int, EncserveError] = {}
        groups = [list(range(len(values)))]

        def progress(done: int, _: int | None) -> None:
            count(len(found) + len(refused) + done)

        while groups:
            self._check_running()  # refused calls report no progress
            group = groups.pop()
            try:
                scores = self._score(
                    [values[index] for index in group],
                    progress=progress,
                    on_tokens=lambda tokens: on_batch(0, tokens),
                )
            except REFUSALS as error:
                if error.index is None:
                    raise
                # A call fails if one pair is refused. Halves need fewer calls if many pairs are refused.
                refused[group.pop(error.index)] = _naming_text(error)
                half = len(group) // 2
                groups += filter(None, (group[:half], group[half:]))
            except FingerprintError as error:
                raise ValueError(f"{error}; {_SERVE_AGAIN}") from error
            else:
                found |= zip(group, scores.reshape(len(group), -1), strict=True)
        return Encoded(self._result([found[index] for index in sorted(found)]) if found else None, refused)

    def _result(self, scores: Sequence[Any]) -> EncodeResult:
        info, rows = self._info, np.stack(scores)  # (pairs, labels)
        output = EncodedOutput("scores", False, (Block(rows, np.ones(len(rows), np.int64)),))  # type: ignore[arg-type]
        timings = Timings(0.0, 0.0, 0.0, 0.0, 0, 0)
        return EncodeResult(info.name, info.version, info.fingerprint, (output,), (), timings, info.space_id)


def _naming_text(error: EncserveError) -> EncserveError:
    """Return the error of a pair. The problem begins with "query" or "document" if one of these texts is at fault."""
    name = error.field.rpartition(".")[2]
    return InvalidRequestError(f"{name} {error.problem}", reason=error.reason) if name in PAIR_COLUMNS else error


def _in_order(result: EncodeResult, order: Sequence[int]) -> EncodeResult:
    """Return the result of the successful inputs, in the order of the values.

    `order`: (inputs,) Input i of the result is value order[i].
    """
    output = result.outputs[0]
    places = [place for place in np.argsort(order).tolist() if place not in result.errors]  # (succeeded,)
    every_rows = [rows for block in output.blocks for rows in block.split()]  # (inputs,) arrays of (rows, width)
    every_indices = [indices for block in output.blocks for indices in block.split_indices()]
    rows = [every_rows[place] for place in places]
    indices = [its for place in places if (its := every_indices[place]) is not None]
    block = Block(
        np.concatenate(rows),
        np.array([len(it) for it in rows], np.int64),
        np.concatenate(indices) if len(indices) == len(rows) else None,
    )
    infos = tuple(result.sequences[place] for place in places)
    return replace(result, outputs=(replace(output, blocks=(block,), errors={}),), sequences=infos, errors={})


def server_facts(info: ModelInfo, make: MakeOptions) -> ModelFacts:
    """Return the facts about a served model for a plan."""
    task = info.tasks.get(make.task) if make.task else None
    width = max(len(info.labels), 1) if make.kind == "scores" else info.width(make.output)
    return ModelFacts(
        model=info.name,
        version=info.version,
        fingerprint=info.fingerprint,
        space_id=info.space_id,
        pooling=str(info.pooling or ""),
        width=(width + 7) // 8 if make.dtype == "binary" else width,
        max_tokens=task.max_tokens if task else info.max_sequence_tokens,
        precision=info.precision,
    )


class ServerBackend:
    """A server, through a client; see `encserve_cli.job.job.Backend`."""

    def __init__(
        self,
        client: EncoderClient,
        model: str | None = None,
        version: str | None = None,
        *,
        include_token_strings: bool = False,
    ) -> None:
        """Keep the client, which the caller closes.

        Args:
            client: The client.
            model: The name of the model; None for the server's default model.
            version: The version of the model; None for the model's default version.
            include_token_strings: Whether to return the strings of tokens, for outputs with several rows per input.
        """
        self._client = client
        self._model = model
        self._version = version
        self._include_token_strings = include_token_strings

    def open(self, make: MakeOptions, before: ModelFacts | None) -> LocalWorker:
        """See `Backend`.

        Raises:
            EncserveError: The server does not answer, or does not have the model or the output.
        """
        info = self._client.model(self._model, self._version)
        if self._version is None and before is not None and (info.name, info.version) != (before.model, before.version):
            # The default version has changed since the job began. The job keeps the old version if the server has it.
            known = [it for it in self._client.models() if (it.name, it.version) == (info.name, before.version)]
            info = known[0] if known else info
        made = replace(make, kind=make.kind or info.trained_kind)
        strings = self._include_token_strings and made.kind in RAGGED
        encoder: ServerEncoder
        if made.kind == "scores":
            encoder = ScoreEncoder(self._client, info, made)
        else:
            encoder = VectorEncoder(self._client, info, made, include_token_strings=strings)
        encoder.check()
        return LocalWorker(made, server_facts(info, made), encoder)
