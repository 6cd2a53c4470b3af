"""The encoder of jobs that uses a server. Inputs of similar length share a message."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from encserve_cli.files.encoding import with_sent_ids
from encserve_cli.files.rows import Value
from encserve_cli.job.plan import MakeOptions, ModelFacts
from encserve_cli.job.run import LocalWorker
from encserve_cli.job.types import BatchProgress, Encoded, Stopped
from encserve_cli.progress import counting
from encserve_client import Block, EncoderClient, EncodeResult, InferenceError, InvalidRequestError, ModelInfo


class ServerEncoder:
    """Encodes through a client. Several threads may use an encoder at the same time."""

    def __init__(self, client: EncoderClient, info: ModelInfo, make: MakeOptions) -> None:
        """`info` is the model; `make` is the output of each value. The caller closes the client."""
        self._info = info
        self._is_tokens = make.kind == "tokens"
        self._run = partial(
            client.run,
            outputs=[make.output],
            model=info.name,
            version=info.version,
            dtype=make.dtype,
            truncate=make.truncate,
            exclude_special_tokens=make.exclude_special,
            prompt_name=make.prompt_name,
            task=make.task,
        )
        self._stopped = False  # not an Event: a signal handler may call `stop`

    def check(self) -> None:
        """Check that the model has the output, before a plan is made or parts are removed.

        Raises:
            InvalidRequestError: The model lacks the output, the task or the prompt. The message lists allowed values.
        """
        self._run([])

    def encode(self, values: Sequence[Value], on_batch: BatchProgress) -> Encoded:
        """See `Encoder`.

        Raises:
            ValueError: The server has replaced the bundle since the job began.
        """

        def count(rows: int) -> None:
            if self._stopped:
                raise Stopped
            on_batch(rows, 0, 0)

        # The server batches only waiting inputs. So messages with inputs of similar length need less padding.
        order = sorted(range(len(values)), key=lambda index: len(values[index]))
        inputs = [values[index] for index in order]
        result = self._run(inputs, progress=counting(count))
        for error in result.errors.values():
            if not isinstance(error, InvalidRequestError | InferenceError):  # the input itself is not the cause
                raise error
        if result.fingerprint != self._info.fingerprint:
            raise ValueError(
                f"the server has replaced the model: {self._info.fingerprint} by {result.fingerprint}; serve that "
                "version again, or begin again with --overwrite"
            )
        on_batch(0, sum(it.token_count for it in result.sequences), 0)
        if self._is_tokens:
            result = with_sent_ids(result, inputs)
        refused = {order[index]: error.problem for index, error in result.errors.items()}
        return Encoded(_in_order(result, order) if len(refused) < len(values) else None, refused)

    def stop(self) -> None:
        """See `Encoder`."""
        self._stopped = True

    def close(self) -> None:
        """See `Encoder`."""
        self._stopped = True


def _in_order(result: EncodeResult, order: Sequence[int]) -> EncodeResult:
    """Return the result of the successful inputs, in the order of the values.

    `order`: (inputs,) the index of each input's value.
    """
    output = result.outputs[0]
    places = [place for place in np.argsort(order).tolist() if place not in result.errors]  # (succeeded,)
    lengths = np.concatenate([block.lengths for block in output.blocks])  # (inputs,)
    rows = np.concatenate([block.rows for block in output.blocks])  # (rows, width)
    which = _indices_of_rows(lengths, places)
    parts = [block.indices for block in output.blocks if block.indices is not None]
    indices = np.concatenate([np.empty(0, np.uint32), *parts])
    block = Block(rows[which], lengths[places], indices[which] if len(indices) == len(rows) else None)
    infos = tuple(result.sequences[place] for place in places)
    return replace(result, outputs=(replace(output, blocks=(block,), errors={}),), sequences=infos, errors={})


def _indices_of_rows(lengths: npt.NDArray[np.int64], places: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return (rows,): the indices of all rows of the selected inputs.

    Args:
        lengths: (inputs,) The number of rows of each input.
        places: (selected,) The indices of the inputs.
    """
    starts = np.cumsum(lengths) - lengths
    chosen = lengths[places]
    offsets = np.arange(int(chosen.sum())) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    return np.repeat(starts[places], chosen) + offsets


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

    def __init__(self, client: EncoderClient, model: str | None = None, version: str | None = None) -> None:
        """`model` and `version` None mean the server's defaults. The caller closes the client."""
        self._client = client
        self._model = model
        self._version = version

    def open(self, make: MakeOptions, kind: str | None, before: ModelFacts | None) -> LocalWorker:
        """See `Backend`.

        Raises:
            EncserveError: The server does not answer, or does not have the model or the output.
        """
        info = self._client.model(self._model, self._version)
        if self._version is None and before is not None and (info.name, info.version) != (before.model, before.version):
            # The default version has changed since the job began. The job keeps the old version if the server has it.
            known = [it for it in self._client.models() if (it.name, it.version) == (info.name, before.version)]
            info = known[0] if known else info
        made = replace(make, kind=kind or info.trained_kind)
        encoder = ServerEncoder(self._client, info, made)
        encoder.check()
        return LocalWorker(made, server_facts(info, made), encoder)
