"""The encoder that uses a server. Inputs of similar length share a message."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np

from encserve_cli.files.encoding import REFUSALS, with_sent_ids
from encserve_cli.files.rows import Value
from encserve_cli.files.writing import RAGGED
from encserve_cli.job.plan import MakeOptions, ModelFacts
from encserve_cli.job.run import LocalWorker
from encserve_cli.job.types import BatchProgress, Encoded, Stopped
from encserve_client import (
    Block,
    EncoderClient,
    EncodeResult,
    EncserveError,
    InferenceError,
    ModelInfo,
    ServerError,
    ServerUnavailableError,
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
_MOST_CRASHING = 4  # if more inputs of one block make the server die, the server itself is broken


class ServerEncoder:
    """Encodes through a client. Several threads may use an encoder at the same time.

    The encoder finds and refuses an input that makes the server die. During the search no other thread sends inputs, so
    only the inputs of the search can make the server die.
    """

    def __init__(
        self, client: EncoderClient, info: ModelInfo, make: MakeOptions, *, include_token_strings: bool = False
    ) -> None:
        """`info` describes the model. `make` has the options of the output. The caller closes the client."""
        self._client = client
        self._info = info
        options = Options(
            (make.output,),
            make.dtype,
            make.truncate,
            make.exclude_special,
            include_token_strings,
            make.prompt_name,
            make.task,
        )
        self._probe = pb.EncodeRequest(model=info.name, model_version=info.version, options=options.to_proto())
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
        self._n_running = 0
        self._may_begin = threading.Condition()
        self._stopped = False  # not an Event: a signal handler may call `stop`, and must not wait for a lock

    def check(self) -> None:
        """Check that the model has the output, before a plan is made or parts are removed.

        Raises:
            InvalidRequestError: The model lacks the output, the task or the prompt. The message lists allowed values.
        """
        self._run([])

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

    def _encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        counted = 0

        def count(done: int, _: int | None) -> None:
            nonlocal counted
            self._check_running()  # `count` is called after failed attempts too
            on_batch(max(done - counted, 0), 0)
            counted = max(done, counted)

        # A message with inputs of similar length needs less padding in the batches of the server.
        order = sorted(range(len(values)), key=lambda index: len(values[index]))
        inputs = [values[index] for index in order]
        result = self._run(inputs, progress=count)
        for error in result.errors.values():
            if not isinstance(error, REFUSALS):  # the input itself is not the cause
                raise error
        if result.fingerprint != self._info.fingerprint:
            raise ValueError(
                f"the server has replaced the bundle {self._info.fingerprint} by {result.fingerprint}; serve the old "
                "version again, or run the command again, for a job with --overwrite"
            )
        on_batch(0, sum(it.token_count for it in result.sequences))
        if isinstance(inputs[0], list):
            result = with_sent_ids(result, inputs)
        refused = {order[index]: error for index, error in result.errors.items()}
        return Encoded(_in_order(result, order) if len(refused) < len(values) else None, refused)

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
        request = pb.EncodeRequest(inputs=[pack_input(value, "inputs") for value in values])
        request.MergeFrom(self._probe)
        try:
            self._client.raw_method("Encode")(request.SerializeToString(), timeout=_PROBE_SECONDS)
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

    def _check_running(self) -> None:
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """See `Encoder`."""
        self._stopped = True

    def close(self) -> None:
        """See `Encoder`."""
        self._stopped = True


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
    width = info.width(make.output)
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
        encoder = ServerEncoder(self._client, info, made, include_token_strings=strings)
        encoder.check()
        return LocalWorker(made, server_facts(info, made), encoder)
