"""The client for threads."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc

from encserve_client._base import (
    DEFAULT_MAX_IN_FLIGHT,
    DEFAULT_MAX_VECTORS_IN_FLIGHT,
    BaseClient,
    EmbedOptions,
    EmbedStreamOptions,
    EncodeOptions,
    EncodeStreamOptions,
    OutputOptions,
    TokenizeOptions,
    embed_options,
    encode_options,
    model_key,
    shown,
    told,
)
from encserve_client._grpc.channel import Link
from encserve_client._grpc.metadata import with_trace
from encserve_client._grpc.sync_wire import SyncWire
from encserve_client._logic.inspecting import inspect_request
from encserve_client._logic.streams import StreamRun
from encserve_client._logic.wire import run_without_loop
from encserve_client.exceptions import EncserveError
from encserve_client.inputs import Input
from encserve_client.options import (
    Array,
    Detail,
    DType,
    Layers,
    OffsetUnit,
    Options,
    Output,
    OutputKind,
    Pooling,
    Progress,
    SpanPooling,
    SpanUnit,
    Task,
    TrainedKind,
    as_outputs,
)
from encserve_client.results import EncodeResult, InspectResult, ModelInfo, SequenceInfo
from encserve_proto.v1.encoder_pb2_grpc import EncoderServiceStub


class EncoderClient(BaseClient):
    """Asks an encserve server for vectors.

    One client holds one channel, connects when it is first used, connects again by itself, and may be used by many
    threads at a time. Close it, or use it in a `with` statement. A client cannot be pickled: make one in each process.

        with EncoderClient("localhost:50051") as client:
            rows = client.encode(["a text", [101, 2023, 102]])  # a (seq, d_model) array for each
            vectors = client.embed(["a text", "another"])       # (2, d_model)

    Where OpenTelemetry's current span is the caller's, its context goes along with every call.

    Every method raises an `EncserveError`, whose subclasses say what happened, and nothing of gRPC's. Calls that are
    too large for one message are cut up and sent in several; see `RetryPolicy` for what is sent again.

    Args:
        target: The server, as "host:port", "host" for port 50051, or any name that gRPC resolves, such as
            "unix:///run/e.sock". Or several, which take turns call by call while their health service says SERVING:
            all addresses of a DNS name, "dns:///encoder", or a list, ["10.0.0.7:50051", "10.0.0.8:50051"]. One
            `encode_stream` stays with one of them until that one stops. Default: the environment variable
            ENCSERVE_TARGET, or "localhost:50051".
        tls: True to encrypt and check the server's certificate, or a `Tls` with files. Default: plaintext.
        credentials: gRPC channel credentials, for what `tls` cannot say. Not both.
        api_key: The server's key, sent with every call as "authorization: Bearer …"; "" for none. Anybody on the way
            can read the key unless `tls` is used, so a `PlaintextKeyWarning` warns of a key that leaves this machine
            in plaintext. Default: the environment variable ENCSERVE_API_KEY.
        metadata: More to send with every call; keys in lower case.
        timeout_seconds: How long one message of a call may take, from when it is first sent until it is answered,
            attempts and the waits between them included; of `encode_stream`, one input. A call of many inputs is many
            messages, and as a whole has a limit only if it is given one of its own. Default: 30. `math.inf` for none.
        max_message_bytes: The largest message to send or take, in bytes. Default: 64 MiB, as the server's replies.
        max_concurrent_messages: How many messages of one call are out at a time. Default: 4.
        retry: When a failed message is sent again. Default: as often as its time allows; see `RetryPolicy`.
        priority: "interactive" for calls that somebody waits for, or "bulk" for those of a job, which run in what
            interactive calls leave. Default: interactive, but a call that needs more than 2 messages is bulk.
        expected_fingerprint: The `fingerprint` that every answer must have, so that all come from one bundle;
            FingerprintError otherwise. Default: any.
        expected_space_id: The `space_id` that every answer must have, so that vectors of another model never get among
            those that were made before; SpaceError otherwise. Default: any.
        channel_arguments: gRPC channel arguments by name; they go before the library's own.

    Raises:
        InvalidInputError: A setting is out of bounds, or of the wrong type, or a file of `tls` cannot be read.
    """

    def _set_up(self) -> None:
        self._lock = threading.Lock()
        self._closers: weakref.WeakKeyDictionary[Link, Callable[[], object]] = weakref.WeakKeyDictionary()
        self._link = self._open()

    def _open(self) -> Link:
        # A channel connects when it is first used.
        if self._credentials is None:
            channel = grpc.insecure_channel(self._target, self._channel_options)
        else:
            channel = grpc.secure_channel(self._target, self._credentials, self._channel_options)
        link = Link(channel, EncoderServiceStub(channel))
        self._closers[link] = closer = weakref.finalize(link, channel.close)
        closer.atexit = False
        return link

    def _current_link(self) -> Link:
        """The channel for a new call."""
        with self._lock:
            self._check_open()
            if (changed := self._freshness.new_credentials()) is not None:
                self._credentials = changed
                self._link = self._open()
            return self._link

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel. Calls that other threads are still in raise `ClientClosedError`. May be called again."""
        with self._lock:
            self._closed = True
            closers = list(self._closers.values())
        for close in closers:
            close()

    @overload
    def encode(  # type: ignore[overload-overlap]
        self,
        inputs: str,
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeOptions],
    ) -> Array: ...

    @overload
    def encode(  # type: ignore[overload-overlap]
        self,
        inputs: str,
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EncodeOptions],
    ) -> Array | EncserveError: ...

    @overload
    def encode(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeOptions],
    ) -> list[Array]: ...

    @overload
    def encode(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EncodeOptions],
    ) -> list[Array | EncserveError]: ...

    def encode(
        self,
        inputs: Iterable[Input],
        *,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        l2_normalize: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
    ) -> Any:
        """One row per token for every input.

        Args:
            inputs: Texts, and sequences of token ids (lists, tuples, or (seq,) integer arrays), freely mixed. For a
                model whose `ModelInfo.input_kind` is "embeddings", vectors instead: a (seq, d_model) array of float32,
                float16, or float64, which is sent as float32, for each. A str is one text.
            model: The model's name. Default: the server's default model.
            version: Its version. Default: the model's default version.
            dtype: The type of the numbers returned; "binary" and "int8" are not for rows of tokens.
            truncate: Whether to cut off the end of an input that is too long for the model. Default: such an input is
                an error.
            exclude_special_tokens: Whether to leave out the rows of special tokens.
            l2_normalize: Whether to scale every row to Euclidean length 1.
            prompt_name: Which of `ModelInfo.prompts` to put before every text; "" for none. Default: the model's own
                `default_prompt_name`, which only texts get.
            task: As for `run`.
            timeout_seconds: How long the whole call may take, however many messages it becomes. Default: no limit for
                the whole, and the client's for each message.
            progress: Called after each message, in the caller's thread, with how many inputs are done and how many
                there are. What it raises ends the call. It begins again where the model was replaced during the call.
            return_exceptions: Whether an input that fails by itself has its `EncserveError` in place of an array: one
                that is no input, is too long or too large, or that the model cannot compute. What ends the others too
                is raised in any case.

        Returns:
            A (seq_len, d_model) array of `dtype` for each input, in order; for a str its array. They are read-only
            views on the bytes received: nothing is copied, and `array.copy()` gives one to write to. One array keeps
            the memory of its whole message alive. Without inputs the list is empty and nothing is sent.

        Raises:
            InvalidInputError: An input or option is of the wrong kind; nothing was sent.
            InvalidRequestError: The server refused an input; the text names it and the numbers, `index` is its place.
            MessageTooLargeError: One input, or its rows, does not fit into a message.
            ModelNotFoundError: There is no such model or version.
            AccessDeniedError: The server, or a proxy before it, did not accept who is asking.
            OverloadedError, ServerUnavailableError: Still so after all retries.
            DeadlineError: The time of the call, or of one of its messages, is up.
            InferenceError: The model could not compute one of the inputs.
            FingerprintError: Another bundle than expected answered, or the model was replaced again and again.
            SpaceError: The vectors would be of another space than expected.
            ServerError, ProtocolError: The server failed without explaining it, or broke the contract.
            CallCancelledError, ClientClosedError: The call was cancelled, or the client closed.
        """
        key, options = (
            model_key(model, version),
            encode_options(
                dtype=dtype,
                truncate=truncate,
                exclude_special_tokens=exclude_special_tokens,
                l2_normalize=l2_normalize,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        return run_without_loop(self._rows(inputs, key, options, timeout_seconds, progress, return_exceptions))

    @overload
    def embed(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EmbedOptions],
    ) -> Array: ...

    @overload
    def embed(  # type: ignore[overload-overlap]
        self,
        inputs: str,
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EmbedOptions],
    ) -> Array | EncserveError: ...

    @overload
    def embed(
        self,
        inputs: Iterable[Input],
        *,
        return_exceptions: Literal[True],
        **options: Unpack[EmbedOptions],
    ) -> list[Array | EncserveError]: ...

    def embed(
        self,
        inputs: Iterable[Input],
        *,
        pooling: Pooling | int = "model",
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        l2_normalize: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
    ) -> Any:
        """One row per input.

        Args:
            inputs: As for `encode`.
            pooling: How the rows of an input's tokens become one: "mean", "cls" (the first token's), "max",
                "last_token", "weighted_mean" or "mean_sqrt_length", each over all of its tokens, special ones included;
                "model" for what the model was trained for: pooled, sent through what it has behind its pooling,
                normalised, and cut, each if it was trained so. A number for an OutputKind without a name here.
            model: As for `encode`.
            version: As for `encode`.
            dtype: As for `encode`. "binary" for one bit a number, set where it is more than 0, as `numpy.packbits` has
                them. "int8" for one byte a number: of the vector x, which is scaled to length 1 whatever `l2_normalize`
                says, `np.clip(np.rint(x * np.float32(127 * np.sqrt(width) / 4)), -128, 127)`. The cosine similarity of
                two is their dot product, of int32, divided by both norms.
            truncate: As for `encode`.
            l2_normalize: Whether to scale every row to Euclidean length 1, after it has been cut.
            dimensions: To how many of its first numbers to cut every row. Default: `ModelInfo.default_dimensions` for
                "model", or all.
            prompt_name: As for `encode`.
            task: As for `run`.
            timeout_seconds: As for `encode`.
            progress: As for `encode`.
            return_exceptions: As for `encode`.

        Returns:
            (inputs, width) of `dtype`; for a str (width,). Read-only: a view on the bytes received if the call fitted
            into one message, otherwise a copy. Without inputs (0, width). The width is d_model, for "model"
            `ModelInfo.vector_width`, or `dimensions`; of "binary" (inputs, ceil(width / 8)) of uint8. With
            `return_exceptions` a list of (width,) arrays and errors.

        Raises:
            EncserveError: As for `encode`. InvalidRequestError also where pooling is "model" and the model does not
                say what it was trained for.
        """
        key, options = (
            model_key(model, version),
            embed_options(
                pooling=pooling,
                dtype=dtype,
                truncate=truncate,
                l2_normalize=l2_normalize,
                dimensions=dimensions,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        return run_without_loop(self._vectors(inputs, key, options, timeout_seconds, progress, return_exceptions))

    def encode_query(
        self,
        inputs: Iterable[Input],
        *,
        kind: TrainedKind | None = None,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = True,
        prompt_name: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
        **output: Unpack[OutputOptions],
    ) -> Any:
        """What the model was trained to make of a text that is looked for, as sentence-transformers' encode_query.

            query = client.encode_query("how warm is the sea?")
            documents = client.encode_document(texts)
            best = rank(query, documents, client.model())

        Args:
            inputs: Texts; a str is one. Of token ids only where the task does not change the text; see
                `ModelInfo.tasks`.
            kind: "model" for one vector each, "multi_vector" for the vectors of MaxSim, "sparse" for weights over the
                vocabulary. Default: the first of these that the model has.
            model: As for `encode`.
            version: As for `encode`.
            dtype: As for `encode`.
            truncate: Whether to cut off the end of an input that is too long, which a `TruncationWarning` then says;
                otherwise it is an error.
            prompt_name: As for `encode`; it takes the place of the task's own prompt.
            timeout_seconds: As for `encode`.
            progress: As for `encode`.
            return_exceptions: As for `encode`; what is returned then is a list, also of one vector each.
            **output: Fields of `Output`: `l2_normalize`, `dimensions`, `max_active_dims`, `pool_factor`.

        Returns:
            Of one vector each an (inputs, width) array; of the vectors of MaxSim a list of (n, width) arrays, with 0
            vectors where nothing of an input counts; of weights a list of `SparseVector`. For a str the one that it has
            in these.

        Raises:
            InvalidRequestError: The model does not know the task, or does not have this kind.
            EncserveError: As for `encode`.
        """
        call = self._encode_task(
            "query",
            inputs,
            kind,
            model,
            version,
            timeout_seconds,
            dtype=dtype,
            truncate=truncate,
            prompt_name=prompt_name,
            progress=progress,
            return_exceptions=return_exceptions,
            **output,
        )
        return told(run_without_loop(call))

    def encode_document(
        self,
        inputs: Iterable[Input],
        *,
        kind: TrainedKind | None = None,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = True,
        prompt_name: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        return_exceptions: bool = False,
        **output: Unpack[OutputOptions],
    ) -> Any:
        """What the model was trained to make of a text that is found; takes and returns what `encode_query` does."""
        call = self._encode_task(
            "document",
            inputs,
            kind,
            model,
            version,
            timeout_seconds,
            dtype=dtype,
            truncate=truncate,
            prompt_name=prompt_name,
            progress=progress,
            return_exceptions=return_exceptions,
            **output,
        )
        return told(run_without_loop(call))

    def run(
        self,
        inputs: Iterable[Input],
        *,
        outputs: Sequence[Output | OutputKind | int] = ("tokens",),
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        include_token_strings: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        detail: Detail | None = None,
        offset_unit: OffsetUnit = "code_points",
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> EncodeResult:
        """Everything about the inputs at once: several outputs, what the model saw of each input, and the timings.

            result = client.run(texts, outputs=["tokens", Output("mean", l2_normalize=True)])
            rows = result.outputs[0].arrays()     # a (seq_len, d_model) array for each
            vectors = result.outputs[1].matrix()  # (inputs, d_model)

        Args:
            inputs: As for `encode`.
            outputs: What to return, each at most once, and at most `ModelInfo.max_outputs` of them: an `Output`, or its
                kind for one that is not normalised.
            model: As for `encode`.
            version: As for `encode`.
            dtype: As for `encode`.
            truncate: As for `encode`.
            exclude_special_tokens: Whether to leave the rows of special tokens out of "tokens".
            include_token_strings: Whether to return the vocabulary's strings in `SequenceInfo.tokens`.
            prompt_name: As for `encode`.
            task: Whether the texts are queries or documents, where the model treats them differently; see
                `ModelInfo.tasks`. Default: neither.
            detail: How much `EncodeResult.sequences` say of each input: "none", "counts" for how many tokens it has,
                and whether it was cut, "tokens" for everything. Default: "tokens" where an output has rows of tokens or
                places in the vocabulary, otherwise "counts".
            offset_unit: What `SequenceInfo.offsets` are counted in.
            timeout_seconds: As for `encode`.
            progress: As for `encode`.

        Returns:
            The result, with the arrays as `encode` and `embed` return them.

        Raises:
            EncserveError: As for `encode`.
        """
        options = Options(
            as_outputs(outputs),
            dtype,
            truncate,
            exclude_special_tokens,
            include_token_strings,
            prompt_name,
            task,
            detail,
            offset_unit,
        )
        return run_without_loop(self._run(inputs, model_key(model, version), options, timeout_seconds, progress))

    def inspect(
        self,
        input: Input,  # noqa: A002 - the contract's own word
        *,
        attention: Layers = True,
        hidden_states: Layers = True,
        positions: bool = False,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
    ) -> InspectResult:
        """What the model did with one input: attention weights and hidden states, layer by layer.

            result = client.inspect("I understand this", attention=[0])
            result.attention[0, 3]     # (seq, seq): block 0, head 3
            result.hidden_states[-1]   # (seq, d_model): what `encode` returns

        Args:
            input: One text, sequence of token ids, or array of vectors, of at most `ModelInfo.max_inspect_tokens`
                tokens.
            attention: The blocks whose attention weights to return, from 0 and ascending; True for all of them, False
                for none.
            hidden_states: The depths whose rows to return, in the same way; there is one more of them than blocks.
            positions: Whether to return what the model adds to tokens for their places.
            model: As for `encode`.
            version: As for `encode`.
            dtype: As for `encode`.
            truncate: As for `encode`.
            prompt_name: As for `encode`, so that what is inspected is what `encode` encodes.
            task: As for `run`.
            timeout_seconds: As for `encode`.

        Returns:
            The result. Its arrays are read-only.

        Raises:
            InspectUnavailableError: The model, or the server, does not answer `inspect`.
            EncserveError: As for `encode`.
        """
        request = inspect_request(
            input,
            model_key(model, version),
            attention=attention,
            hidden_states=hidden_states,
            positions=positions,
            dtype=dtype,
            truncate=truncate,
            prompt_name=prompt_name,
            task=task,
        )
        return run_without_loop(self._core.inspect(self._wire(), request, timeout_seconds))

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeStreamOptions],
    ) -> Generator[Array, None, None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EncodeStreamOptions],
    ) -> Generator[tuple[int, Array], None, None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[True],
        **options: Unpack[EncodeStreamOptions],
    ) -> Generator[Array | EncserveError, None, None]: ...

    @overload
    def encode_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[True],
        **options: Unpack[EncodeStreamOptions],
    ) -> Generator[tuple[int, Array | EncserveError], None, None]: ...

    def encode_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        l2_normalize: bool = False,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
    ) -> Generator[Any, None, None]:
        """Encodes as many inputs as there are, however many, in bounded memory: one row per token for each.

            for rows in client.encode_stream(read_texts()):  # (seq_len, d_model)
                ...

        Inputs are read in the caller's thread, when the next result is asked for, and never more than `max_in_flight`
        ahead of the results taken. Short ones that come fast share messages. A stream that breaks is opened again, and
        only what was not answered is sent again. Leaving the loop, or closing the generator, cancels what is still
        going on.

        Args:
            inputs: As for `encode`; may be endless.
            ordered: Whether results come in the order of the inputs. If not, each comes as soon as it is ready, as
                (index, result).
            return_exceptions: Whether an input that fails yields its `EncserveError` in place of an array. If not, it
                is raised and ends the call. A stream that breaks for good is raised in any case.
            model: As for `encode`.
            version: As for `encode`.
            dtype: As for `encode`.
            truncate: As for `encode`.
            exclude_special_tokens: As for `encode`.
            l2_normalize: As for `encode`.
            prompt_name: As for `encode`.
            task: As for `run`.
            timeout_seconds: How long one input may take from when it is read until it is answered, retries included,
                not counting the time that the caller is busy with results, or with making the next input. Default: the
                client's. The stream as a whole has no limit.
            progress: Called with each result, with how many there were and, where `inputs` has a length, of how many.
            max_in_flight: How many inputs may be read and not yet yielded.

        Yields:
            A read-only (seq_len, d_model) array per input.

        Raises:
            EncserveError: As for `encode`.
            FingerprintError: The model was replaced while the stream ran.
        """
        key, options = (
            model_key(model, version),
            encode_options(
                dtype=dtype,
                truncate=truncate,
                exclude_special_tokens=exclude_special_tokens,
                l2_normalize=l2_normalize,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        run = self._stream(inputs, key, options, ordered, max_in_flight, timeout_seconds, progress)
        return self._results(run, ordered, return_exceptions)

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EmbedStreamOptions],
    ) -> Generator[Array, None, None]: ...

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[False] = ...,
        **options: Unpack[EmbedStreamOptions],
    ) -> Generator[tuple[int, Array], None, None]: ...

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[True] = ...,
        return_exceptions: Literal[True],
        **options: Unpack[EmbedStreamOptions],
    ) -> Generator[Array | EncserveError, None, None]: ...

    @overload
    def embed_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: Literal[False],
        return_exceptions: Literal[True],
        **options: Unpack[EmbedStreamOptions],
    ) -> Generator[tuple[int, Array | EncserveError], None, None]: ...

    def embed_stream(
        self,
        inputs: Iterable[Input],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        pooling: Pooling | int = "model",
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        l2_normalize: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        max_in_flight: int = DEFAULT_MAX_VECTORS_IN_FLIGHT,
    ) -> Generator[Any, None, None]:
        """Embeds as many inputs as there are, however many, in bounded memory: one row for each.

            for vector in client.embed_stream(read_texts()):  # (width,)
                ...

        It works as `encode_stream` does, and has its arguments, with those of `embed` that say what comes back.

        Yields:
            A read-only (width,) array per input; of "binary" (ceil(width / 8),).

        Raises:
            EncserveError: As for `embed`.
            FingerprintError: The model was replaced while the stream ran.
        """
        key, options = (
            model_key(model, version),
            embed_options(
                pooling=pooling,
                dtype=dtype,
                truncate=truncate,
                l2_normalize=l2_normalize,
                dimensions=dimensions,
                prompt_name=prompt_name,
                task=task,
            ),
        )
        run = self._stream(inputs, key, options, ordered, max_in_flight, timeout_seconds, progress)
        return self._results(run, ordered, return_exceptions)

    @overload
    def tokenize(  # type: ignore[overload-overlap]
        self, texts: str, **options: Unpack[TokenizeOptions]
    ) -> SequenceInfo: ...

    @overload
    def tokenize(self, texts: Iterable[str], **options: Unpack[TokenizeOptions]) -> list[SequenceInfo]: ...

    def tokenize(
        self,
        texts: Iterable[str],
        *,
        model: str | None = None,
        version: str | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        truncate: bool | None = None,
        include_token_strings: bool = False,
        offset_unit: OffsetUnit = "code_points",
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Which tokens the model would see of texts, with nothing computed; answers while the model is not ready.

            info = client.tokenize("I understand this")
            info.token_ids, info.offsets, info.token_count

        Args:
            texts: The texts. A str is one text.
            model: As for `encode`.
            version: As for `encode`.
            prompt_name: As for `encode`.
            task: As for `run`.
            truncate: True to cut off the end of a text that is too long, as `encode` would; False to have it refused.
                Default: all of its tokens, however many.
            include_token_strings: Whether to return the vocabulary's strings in `SequenceInfo.tokens`.
            offset_unit: What `SequenceInfo.offsets` are counted in.
            timeout_seconds: As for `encode`.
            progress: As for `encode`.

        Returns:
            A `SequenceInfo` for each text, in order; for a str its own.

        Raises:
            EncserveError: As for `encode`. InvalidRequestError also where the model has no tokenizer.
        """
        key = model_key(model, version)
        options = Options(
            truncate=bool(truncate),
            include_token_strings=include_token_strings,
            prompt_name=prompt_name,
            task=task,
            offset_unit=offset_unit,
        )
        return run_without_loop(self._tokenize(texts, key, options, truncate, timeout_seconds, progress))

    def embed_spans(
        self,
        text: Input,
        spans: Iterable[tuple[int, int]],
        *,
        unit: SpanUnit | None = None,
        pooling: SpanPooling = "mean",
        model: str | None = None,
        version: str | None = None,
        dtype: DType = "float32",
        truncate: bool = False,
        l2_normalize: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        task: Task | None = None,
        timeout_seconds: float | None = None,
    ) -> Array:
        """One row for each range of one text, from one run over the whole of it: late chunking.

            vectors = client.embed_spans(text, sentence_spans(text))  # (sentences, d_model)

        Each token's row is made in sight of the whole text, and only then the rows of a range are pooled.

        Args:
            text: The text; or token ids, or vectors, as one input of `encode`.
            spans: (start, end) of each range, the end not included, at most 16,384 of them; they may overlap.
                `sentence_spans` and `token_spans` make some. A range has the tokens that it shares characters with,
                never special ones or those of a prompt.
            unit: What they are counted in; "tokens" counts all of them, special ones too. Default: "code_points" of a
                text, otherwise "tokens".
            pooling: How the rows of a range become one, as for `embed`.
            model: As for `encode`.
            version: As for `encode`.
            dtype: As for `embed`.
            truncate: As for `encode`. What is cut off has no tokens.
            l2_normalize: As for `embed`.
            dimensions: As for `embed`.
            prompt_name: As for `encode`.
            task: As for `run`.
            timeout_seconds: As for `encode`.

        Returns:
            (spans, d_model) of `dtype`, read-only; a row of zeros for a range without tokens: an empty one, white
            space, or what was cut off.

        Raises:
            EncserveError: As for `encode`. InvalidRequestError also where a range starts behind its end, or ends behind
                the text.
        """
        key = model_key(model, version)
        output = Output("spans", l2_normalize, dimensions, span_pooling=pooling)
        options = Options((output,), dtype, truncate, prompt_name=prompt_name, task=task, detail="none")
        return run_without_loop(self._spans(text, spans, unit, key, options, timeout_seconds))

    def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Every model and version that the server has loaded, the default first.

        Raises:
            EncserveError: As for `encode`.
        """
        return run_without_loop(self._core.list_models(self._wire(), timeout_seconds))

    def model(
        self, name: str | None = None, version: str | None = None, *, timeout_seconds: float | None = None
    ) -> ModelInfo:
        """One model: its sizes, its limits, and what it runs on; without a name the server's default one.

        Raises:
            ModelNotFoundError: There is no such model or version.
            EncserveError: As for `encode`.
        """
        return run_without_loop(self._core.get_model(self._wire(), model_key(name, version), timeout_seconds))

    def _wire(self, inputs: Iterable[Input] = ()) -> SyncWire:
        self._check_open()
        return SyncWire(
            self._current_link, with_trace(self._metadata), iter(inputs), lambda: self._closed, self._diagnosis
        )

    def _results(self, run: StreamRun, ordered: bool, return_exceptions: bool) -> Generator[Any, None, None]:
        try:
            while (result := run_without_loop(run.next())) is not None:
                yield shown(*result, ordered, return_exceptions)
        finally:
            run_without_loop(run.aclose())
