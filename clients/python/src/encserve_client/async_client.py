"""The client for asyncio."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

from encserve_client._async_transport import AsyncTransport, Results, StreamInputs
from encserve_client._base import (
    ClassifyOptions,
    EmbedOptions,
    StreamCallOptions,
    TokenizeOptions,
    TokenVectorOptions,
    model_key,
)
from encserve_client._logic.inspecting import inspect_request
from encserve_client._logic.scores import ScoreOptions
from encserve_client.exceptions import EncserveError
from encserve_client.inputs import Input
from encserve_client.options import (
    Activation,
    Array,
    Detail,
    DType,
    Kind,
    Layers,
    OffsetUnit,
    Options,
    Output,
    OutputKind,
    Pooling,
    Progress,
    SpanPooling,
    SpanUnit,
    StreamKind,
    Task,
    as_outputs,
    embed_output,
)
from encserve_client.results import (
    Classification,
    EncodeResult,
    InspectResult,
    ModelInfo,
    SequenceInfo,
    SparseVector,
)


class AsyncEncoderClient(AsyncTransport):
    """A client of an encserve server, for asyncio.

        async with AsyncEncoderClient("localhost:50051") as client:
            vectors = await client.embed(["a text", "another"])       # (2, d_model)
            rows = await client.token_vectors(["a text", "another"])  # a (seq_len, d_model) array for each

    A client has one channel. The client connects at the first call, and reconnects automatically. Many calls may use a
    client at the same time. A client cannot be pickled: make a client in each process. Every call sends the current
    OpenTelemetry context.

    The methods raise subclasses of `EncserveError`. The client splits large calls into messages. A message with a
    temporary failure is sent again; see `RetryPolicy`.

    Args:
        target: The server, as "host:port", "host" for port 50051, or any name that gRPC resolves, such as
            "unix:///run/e.sock". For several servers: "dns:///encoder" uses all addresses of a DNS name. A list names
            each server: ["10.0.0.7:50051", "10.0.0.8:50051"]. Messages go in turn to all servers whose health service
            says SERVING.
            Default: the environment variable ENCSERVE_TARGET, or "localhost:50051".
        tls: True for encryption with a check of the server's certificate, or a `Tls` with files. Default: plaintext.
        credentials: gRPC channel credentials, for settings that `Tls` lacks. Give `tls` or `credentials`, not both.
        api_key: The server's key, sent with every call as "authorization: Bearer …"; "" for no key. Without
            `tls`, others on the network can read the key. A `PlaintextKeyWarning` warns if the server is on another
            machine. Default: the environment variable ENCSERVE_API_KEY.
        metadata: Additional metadata of every call; keys in lower case.
        timeout_seconds: The time limit of one message, from the first attempt until the answer, with retries and
            waits. A call of many messages has no total limit, unless the method's `timeout_seconds` is given.
            Default: 30. `math.inf` for no limit.
        max_message_bytes: The largest message to send or receive, in bytes. Default: 64 MiB, the limit of the server's
            replies.
        max_concurrent_messages: The largest number of messages that one call has in flight. Default: 4.
        retry: When and how often a failed message is sent again. Default: until the message's time is over; see
            `RetryPolicy`.
        priority: "interactive" for calls of waiting users, "bulk" for jobs. Jobs get the capacity that interactive
            calls do not use. Default: "bulk" for calls of more than 2 messages, otherwise "interactive".
        expected_fingerprint: The `fingerprint` that every answer must have, so that all answers come from one bundle.
            Another fingerprint raises FingerprintError. Default: any.
        expected_space_id: The `space_id` that every answer must have, so that vectors of different models never mix.
            Another space raises SpaceError. Default: any.
        on_outage: A function that gets an `Outage`. A call that waits for an unavailable server calls the function half
            a second after the first failure, and again when the server answers. An exception of `on_outage` ends the
            call.
        channel_arguments: gRPC channel arguments by name. They override the arguments of the library.

    Raises:
        InvalidInputError: A setting is out of bounds or has the wrong type, or a file of `tls` cannot be read.
    """

    @overload
    async def embed(
        self, inputs: Iterable[Input], *, kind: Literal["vector"] = ..., **options: Unpack[EmbedOptions]
    ) -> Array: ...

    @overload
    async def embed(  # type: ignore[overload-overlap]
        self, inputs: str, *, kind: Literal["multi_vector"], **options: Unpack[EmbedOptions]
    ) -> Array: ...

    @overload
    async def embed(
        self, inputs: Iterable[Input], *, kind: Literal["multi_vector"], **options: Unpack[EmbedOptions]
    ) -> list[Array]: ...

    @overload
    async def embed(  # type: ignore[overload-overlap]
        self, inputs: str, *, kind: Literal["sparse"], **options: Unpack[EmbedOptions]
    ) -> SparseVector: ...

    @overload
    async def embed(
        self, inputs: Iterable[Input], *, kind: Literal["sparse"], **options: Unpack[EmbedOptions]
    ) -> list[SparseVector]: ...

    async def embed(
        self,
        inputs: Iterable[Input],
        *,
        kind: Kind = "vector",
        pooling: Pooling = "model",
        task: Task | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        dimensions: int | None = None,
        l2_normalize: bool = False,
        dtype: DType = "float32",
        max_active_dims: int | None = None,
        pool_factor: float | None = None,
        model: str | None = None,
        version: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Return one vector per input. An input that is too long is an error, unless `truncate` is True.

            query = await client.embed("how warm is the sea?", task="query")
            documents = await client.embed(texts, task="document")
            best = rank(query, documents, await client.model())

        Args:
            inputs: Texts, and sequences of token ids (lists, tuples, or (seq,) integer arrays), freely mixed. A model
                with `ModelInfo.input_kind` "embeddings" takes vectors instead: a (seq, d_model) array of float32,
                float16, or float64 for each input; float64 is sent as float32. A str is one text.
            kind: "vector" for one vector per input; "multi_vector" for the vectors that MaxSim compares; "sparse" for
                weights over the vocabulary. `ModelInfo.kinds` has the kinds of a model.
            pooling: For "vector": how the rows of the tokens become one vector. "model" pools as the model was
                trained, then applies the model's layers, normalisation and default dimensions. The others pool over
                all tokens, special tokens included: "mean", "cls" (the first token), "max", "last_token",
                "weighted_mean", "mean_sqrt_length".
            task: "query" for a search query, "document" for a document to search. Only for models that treat the two
                differently; see `ModelInfo.tasks`. Default: no task.
            prompt_name: The prompt to put before every text: a name in `ModelInfo.prompts`, or "" for no prompt.
                Default: the prompt of the task, or `ModelInfo.default_prompt_name`. Only texts get a prompt.
            truncate: Whether to cut off the end of an input that is too long for the model.
            dimensions: Keep only this many numbers at the start of each vector. Default: for pooling "model"
                `ModelInfo.default_dimensions`, otherwise all.
            l2_normalize: Whether to scale each vector to Euclidean length 1, after the cut to `dimensions`.
            dtype: The type of the numbers: "float32", "float16", "int8" (not for "sparse") or "binary" (only for
                "vector"). "binary" has one bit per number, set if the number is above 0, packed as by `numpy.packbits`.
                For "int8", a vector x is scaled to length 1 and then becomes
                `np.clip(np.rint(x * np.float32(127 * np.sqrt(width) / 4)), -128, 127)`. The cosine similarity of two
                such vectors is the dot product, in int32, divided by both norms.
            max_active_dims: For "sparse": keep only this many of the largest weights. Default: as the model was
                trained.
            pool_factor: For "multi_vector": how many vectors are merged into one on average, by hierarchical
                clustering. An input of more than 2,048 tokens is an error. Default: as the model was trained.
            model: The name of the model. Default: the server's default model.
            version: The version of the model. Default: the model's default version.
            timeout_seconds: The time limit of the whole call. Default: no such limit; the client's `timeout_seconds`
                limits each message.
            progress: A function that runs in the caller's thread after each attempt of a message, and at least every
                second. Arguments: the number of finished inputs, and of all inputs. An exception of `progress` ends the
                call. The count starts again if the model was replaced during the call.

        Returns:
            For "vector": (inputs, width) of `dtype`, or (width,) for a str. The width is `dimensions`. Without
            `dimensions`, the width for pooling "model" is `ModelInfo.default_dimensions`, or `ModelInfo.vector_width`
            if the default is 0. For the other poolings the width is d_model. For "binary": ceil(width / 8) of uint8.
            For "multi_vector": a list of (n, width) arrays. For "sparse": a list of `SparseVector`. For a str: the one
            element without the list.

        Raises:
            InvalidInputError: An input or an argument has the wrong type, or an input cannot be sent.
            InvalidRequestError: The server refused an input, or the model lacks the kind, pooling, task or prompt. The
                message names the problem and the allowed values. `index` is the index of the input.
            MessageTooLargeError: One input, or the vectors of one input, do not fit into a message.
            ModelNotFoundError: The model or the version does not exist.
            AccessDeniedError: The server or a proxy refused the caller.
            OverloadedError, ServerUnavailableError: The server was still full or unreachable at the last retry.
            DeadlineError: The time of the call, or of one message, is over.
            InferenceError: The model could not compute an input.
            FingerprintError: The fingerprint is not the expected one, or the model was replaced again and again.
            SpaceError: The vector space is not the expected one.
            ServerError, ProtocolError: The server failed without a reason, or sent an invalid answer.
            CallCancelledError, ClientClosedError: The call was cancelled, or the client was closed.
        """
        output = embed_output(kind, pooling, l2_normalize, dimensions, max_active_dims, pool_factor, Kind)
        options = Options((output,), dtype, truncate, prompt_name=prompt_name, task=task, detail="none")
        key = model_key(model, version)
        return await self._call(self._core.embed(self._wire(), inputs, key, options, timeout_seconds, progress))

    @overload
    async def token_vectors(  # type: ignore[overload-overlap]
        self, inputs: str, **options: Unpack[TokenVectorOptions]
    ) -> Array: ...

    @overload
    async def token_vectors(self, inputs: Iterable[Input], **options: Unpack[TokenVectorOptions]) -> list[Array]: ...

    async def token_vectors(
        self,
        inputs: Iterable[Input],
        *,
        task: Task | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        dimensions: int | None = None,
        l2_normalize: bool = False,
        dtype: DType = "float32",
        model: str | None = None,
        version: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Return one row per token of each input. An input that is too long is an error, unless `truncate` is True.

        Args:
            exclude_special_tokens: Whether to leave out the rows of special tokens.
            dimensions: Keep only this many numbers at the start of each row. Default: all.
            l2_normalize: Whether to scale each row to Euclidean length 1.
            dtype: "float32" or "float16".

        All other arguments are the same as for `embed`.

        Returns:
            A list of one (seq_len, d_model) array for each input, in order. For a str: one array, without a list. The
            arrays of one message share memory.

        Raises:
            EncserveError: As for `embed`.
        """
        output = Output("tokens", l2_normalize, dimensions)
        options = Options(
            (output,), dtype, truncate, exclude_special_tokens, prompt_name=prompt_name, task=task, detail="counts"
        )
        key = model_key(model, version)
        return await self._call(self._core.embed(self._wire(), inputs, key, options, timeout_seconds, progress))

    @overload
    def stream(
        self, inputs: StreamInputs, *, kind: Literal["sparse"], **options: Unpack[StreamCallOptions]
    ) -> Results[SparseVector | EncserveError]: ...

    @overload
    def stream(
        self,
        inputs: StreamInputs,
        *,
        kind: Literal["vector", "tokens", "multi_vector"] = ...,
        **options: Unpack[StreamCallOptions],
    ) -> Results[Array | EncserveError]: ...

    def stream(
        self,
        inputs: StreamInputs,
        *,
        kind: StreamKind = "vector",
        pooling: Pooling = "model",
        task: Task | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        exclude_special_tokens: bool = False,
        dimensions: int | None = None,
        l2_normalize: bool = False,
        dtype: DType = "float32",
        max_active_dims: int | None = None,
        pool_factor: float | None = None,
        model: str | None = None,
        version: str | None = None,
        ordered: bool = True,
        max_in_flight: int | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Results[Any]:
        """Yield (index, vector or error) for any number of inputs, in bounded memory.

        An input that is too long is an error, unless `truncate` is True.

            async for index, vector in client.stream(read_texts()):
                if isinstance(vector, EncserveError):
                    print(index, vector)

        The client reads inputs while the caller takes results, at most `max_in_flight` ahead. Inputs that arrive fast
        share a message. A message with a temporary failure is sent again. Closing the generator cancels the messages
        in flight.

        Args:
            inputs: As for `embed`. The iterable may be endless, and the async client takes async iterables too.
            kind: As for `embed`, or "tokens" for one row per token.
            exclude_special_tokens: For "tokens": whether to leave out the rows of special tokens.
            ordered: Whether results come in the order of the inputs. Otherwise results come as soon as they are ready.
            max_in_flight: The largest number of inputs that were read but have no yielded result yet. Default: 2,048
                for "vector" and "sparse", 64 for "tokens" and "multi_vector".
            timeout_seconds: The time limit of one message, from the first attempt until the answer, with retries. Time
                that the caller spends on results or inputs does not count. Default: `timeout_seconds` of the client.
                The stream as a whole has no limit.
            progress: A function that is called with each result. Arguments: the number of results so far, and of all
                inputs (None if `inputs` has no length).

        All other arguments are the same as for `embed`.

        Yields:
            (index, result) of each input. The result is (width,) for "vector", (seq_len, d_model) for "tokens", (n,
            width) for "multi_vector", and a `SparseVector` for "sparse". The result of a failed input is an
            `EncserveError`: the input is invalid, the server refused the input, or the message of the input failed.

        Raises:
            FingerprintError: The model was replaced while the stream ran.
            EncserveError: The failure concerns all inputs: a wrong option, no access, or no server.
        """
        output = embed_output(kind, pooling, l2_normalize, dimensions, max_active_dims, pool_factor, StreamKind)
        options = Options(
            (output,),
            dtype,
            truncate,
            exclude_special_tokens,
            prompt_name=prompt_name,
            task=task,
            detail="counts" if kind == "tokens" else "none",
        )
        key = model_key(model, version)
        results = self._core.stream(
            self._wire,
            inputs,
            key,
            options,
            ordered=ordered,
            max_in_flight=max_in_flight,
            timeout_seconds=timeout_seconds,
            progress=progress,
        )
        return self._iterate(results)

    async def run(
        self,
        inputs: Iterable[Input],
        *,
        outputs: Sequence[Output | OutputKind] = ("tokens",),
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
        """Return several outputs, the tokens of each input, and the timings.

        An input that is too long is an error, unless `truncate` is True.

            result = await client.run(texts, outputs=["tokens", Output("mean", l2_normalize=True)])
            rows = result.outputs[0].arrays()     # a (seq_len, d_model) array for each
            vectors = result.outputs[1].matrix()  # (inputs, d_model)

        A failed input does not fail the others. `EncodeResult.errors` has the error of each failed input, and
        `arrays` and `matrix` raise the first of these errors. `array(index)` returns the rows of one input.

        Args:
            outputs: At most `ModelInfo.max_outputs` different outputs. Each is an `Output` or a kind. A kind stands for
                `Output(kind)`.
            exclude_special_tokens: Whether to leave the rows of special tokens out of "tokens".
            include_token_strings: Whether to return the vocabulary's strings in `SequenceInfo.tokens`.
            detail: The content of `EncodeResult.sequences`. "none" is empty. "counts" has the numbers of tokens and
                whether the input was cut. "tokens" has everything. Default: "tokens" with `include_token_strings`, or
                if an output is "tokens", "multi_vector" or "sparse"; otherwise "counts".
            offset_unit: The unit of `SequenceInfo.offsets`.

        All other arguments are the same as for `embed`.

        Returns:
            The result.

        Raises:
            EncserveError: The failure concerns all inputs: a wrong option, no access, or no server. Or no message
                was answered, or 8 messages failed in a row.
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
        key = model_key(model, version)
        return await self._call(self._core.run(self._wire(), inputs, key, options, timeout_seconds, progress))

    async def inspect(
        self,
        input: Input,  # noqa: A002 - the name in the .proto file
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
        """Return the attention weights and hidden states of one input, layer by layer.

        An input that is too long is an error, unless `truncate` is True.

            result = await client.inspect("I understand this", attention=[0])
            result.attention[0, 3]     # (seq, seq): block 0, head 3
            result.hidden_states[-1]   # (seq, d_model): the rows of `token_vectors`

        Args:
            input: One text, sequence of token ids, or array of vectors, of at most `ModelInfo.max_inspect_tokens`
                tokens.
            attention: The indices of the blocks for attention weights, ascending from 0. True: all. False: none.
            hidden_states: The depths for hidden states, ascending from 0. True: all. False: none. A model with n blocks
                has the depths 0 to n.
            positions: Whether to return the position vectors that the model adds to tokens.
            dtype: "float32" or "float16".

        All other arguments are the same as for `embed`.

        Returns:
            The result.

        Raises:
            InspectUnavailableError: The model or the server does not support `inspect`.
            EncserveError: As for `embed`.
        """
        options = Options(dtype=dtype, truncate=truncate, prompt_name=prompt_name, task=task)
        key = model_key(model, version)
        request = inspect_request(
            input, key, options, attention=attention, hidden_states=hidden_states, positions=positions
        )
        return await self._call(self._core.inspect(self._wire(), request, key, options, timeout_seconds))

    @overload
    async def tokenize(  # type: ignore[overload-overlap]
        self, texts: str, **options: Unpack[TokenizeOptions]
    ) -> SequenceInfo: ...

    @overload
    async def tokenize(self, texts: Iterable[str], **options: Unpack[TokenizeOptions]) -> list[SequenceInfo]: ...

    async def tokenize(
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
        """Return the tokens of texts without running the model. The model need not be ready.

            info = await client.tokenize("I understand this")
            info.token_ids, info.offsets, info.token_count

        Args:
            texts: The texts. A str is one text.
            truncate: True: cut a text that is too long, as for `embed`. False: refuse the text. Default: return all
                tokens, also of a text that is too long.
            include_token_strings: Whether to return the vocabulary's strings in `SequenceInfo.tokens`.
            offset_unit: The unit of `SequenceInfo.offsets`.

        All other arguments are the same as for `embed`.

        Returns:
            A list of one `SequenceInfo` for each text, in order. For a str: one `SequenceInfo`, without a list.

        Raises:
            EncserveError: As for `embed`. InvalidRequestError also if the model has no tokenizer.
        """
        options = Options(
            truncate=bool(truncate),
            include_token_strings=include_token_strings,
            prompt_name=prompt_name,
            task=task,
            offset_unit=offset_unit,
        )
        key = model_key(model, version)
        call = self._core.tokenize(self._wire(), texts, key, options, truncate, timeout_seconds, progress)
        return await self._call(call)

    async def embed_spans(
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
        """Return one vector for each range of one text (late chunking). The context of each range is the whole text.

        A text that is too long is an error, unless `truncate` is True.

            vectors = await client.embed_spans(text, sentence_spans(text))  # (sentences, d_model)

        Args:
            text: A text, token ids, or vectors, like one input of `embed`.
            spans: (start, end) of each range, end exclusive. At most 16,384 ranges, which may overlap. `sentence_spans`
                and `token_spans` return ranges. The tokens of a range are all tokens that overlap the range, except
                special tokens and tokens of a prompt.
            unit: The unit of the ranges; "tokens" counts special tokens too. Default: "code_points" for a text,
                otherwise "tokens".
            pooling: How the rows of a range become one vector, as for `embed`.
            truncate: As for `embed`. A range in the cut-off text has no tokens.

        All other arguments are the same as for `embed`.

        Returns:
            (spans, d_model) of `dtype`. A range without tokens has a row of zeros. Examples are an empty range, white
            space, and cut-off text.

        Raises:
            EncserveError: As for `embed`. InvalidRequestError also if a range starts after its end, or ends after the
                text.
        """
        output = Output("spans", l2_normalize, dimensions, span_pooling=pooling)
        options = Options((output,), dtype, truncate, prompt_name=prompt_name, task=task, detail="none")
        key = model_key(model, version)
        call = self._core.embed_spans(self._wire(), text, spans, unit, key, options, timeout_seconds)
        return await self._call(call)

    async def rank(
        self,
        query: str,
        documents: Iterable[str] | Array | Sequence[Array] | Sequence[SparseVector],
        *,
        top_k: int | None = None,
        activation: Activation | None = None,
        truncate: bool = True,
        prompt_name: str | None = None,
        max_document_tokens: int | None = None,
        model: str | None = None,
        version: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> list[tuple[int, float]]:
        """Sort documents by their score for a query. The server computes the scores with any model.

            best = await client.rank("how warm is the sea?", texts, top_k=10)
            for index, score in best:
                print(score, texts[index])

        A cross-encoder compares the query with each document. For other models, a score is the similarity of the
        vectors of the query and the document; see `ModelInfo.score_method`. The function `encserve_client.rank`
        compares vectors that the caller already has.

        Args:
            query: The query.
            documents: Texts. Or, for models without labels, the vectors of documents in the form that `embed` returns:
                (documents, width), a list of (n, width) arrays for MaxSim, or a list of `SparseVector`.
            top_k: The number of documents to return. Default: all.
            activation: The function that turns the logits of a cross-encoder into scores: "none", "sigmoid" or
                "softmax". "softmax" is only for several labels, so only for `score` and `classify`. Default:
                `ModelInfo.activation`.
            truncate: Whether to cut a pair that is too long, as the model was trained. If False, such a
                pair is an error.
            prompt_name: The prompt before the query of a cross-encoder: a name in `ModelInfo.prompts`, or "" for no
                prompt. Default: `ModelInfo.default_prompt_name`.
            max_document_tokens: The largest number of tokens of a document. The end of a longer document is cut, also
                with `truncate=False`. Special tokens count only for models without labels. Not for vectors. Default:
                as many as the model takes.
            model: As for `embed`.
            version: As for `embed`.
            timeout_seconds: As for `embed`.
            progress: As for `embed`.

        Returns:
            (index, score) of each document, the best first. Equal scores keep the order of the documents.

        Raises:
            EncserveError: As for `embed`. InvalidRequestError also if the model has several labels, or cannot score.
        """
        options = ScoreOptions(activation, truncate, prompt_name, max_document_tokens, top_k)
        key = model_key(model, version)
        call = self._core.rank(self._wire(), query, documents, key, options, timeout_seconds, progress)
        return await self._call(call)

    async def score(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        activation: Activation | None = None,
        truncate: bool = True,
        prompt_name: str | None = None,
        max_document_tokens: int | None = None,
        model: str | None = None,
        version: str | None = None,
        expected_fingerprint: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Array:
        """Return the score of each pair of texts, in the order of the pairs. See `rank` for the models.

            scores = await client.score([("how warm is the sea?", "The sea has 19 °C.")])

        Args:
            pairs: (query, document) pairs.
            activation: As for `rank`.
            truncate: As for `rank`.
            prompt_name: As for `rank`.
            max_document_tokens: As for `rank`.
            model: As for `embed`.
            version: As for `embed`.
            expected_fingerprint: The fingerprint of the bundle that must compute the scores. Default: that of the
                client.
            timeout_seconds: As for `embed`.
            progress: As for `embed`.
            on_tokens: Called once after all replies, with the number of tokens that the server processed.

        Returns:
            (pairs,) float32. For a model with several labels (pairs, labels), in the order of `ModelInfo.labels`.

        Raises:
            EncserveError: As for `rank`.
        """
        options = ScoreOptions(activation, truncate, prompt_name, max_document_tokens)
        key = model_key(model, version)
        call = self._core.score(
            self._wire(), pairs, key, options, expected_fingerprint, timeout_seconds, progress, on_tokens
        )
        return await self._call(call)

    @overload
    async def classify(  # type: ignore[overload-overlap]
        self, texts: str, **options: Unpack[ClassifyOptions]
    ) -> Classification: ...

    @overload
    async def classify(self, texts: Iterable[str], **options: Unpack[ClassifyOptions]) -> list[Classification]: ...

    async def classify(
        self,
        texts: Iterable[str],
        *,
        activation: Activation | None = None,
        truncate: bool = True,
        prompt_name: str | None = None,
        model: str | None = None,
        version: str | None = None,
        timeout_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Return the scores of each label for texts. Use `score` for a classifier of pairs.

            found = await client.classify("What a lovely day!")
            found.label, found.score

        Args:
            texts: The texts. A str is one text.
            activation: As for `rank`.
            truncate: Whether to cut a text that is too long. Otherwise the text is an error.
            prompt_name: The prompt before every text, as for `rank`.
            model: As for `embed`.
            version: As for `embed`.
            timeout_seconds: As for `embed`.
            progress: As for `embed`.

        Returns:
            A list of one `Classification` for each text, in order. For a str: one `Classification`, without a list.

        Raises:
            EncserveError: As for `embed`. InvalidRequestError also if the model is not a classifier.
        """
        options = ScoreOptions(activation, truncate, prompt_name)
        key = model_key(model, version)
        return await self._call(self._core.classify(self._wire(), texts, key, options, timeout_seconds, progress))

    async def models(self, *, timeout_seconds: float | None = None) -> list[ModelInfo]:
        """Return all loaded models and versions, the default model first.

        Raises:
            EncserveError: As for `embed`.
        """
        return await self._call(self._core.list_models(self._wire(), timeout_seconds))

    async def model(
        self, name: str | None = None, version: str | None = None, *, timeout_seconds: float | None = None
    ) -> ModelInfo:
        """Return the sizes, the limits and the device of one model. Default: the server's default model.

        Raises:
            ModelNotFoundError: The model or the version does not exist.
            EncserveError: As for `embed`.
        """
        return await self._call(self._core.get_model(self._wire(), model_key(name, version), timeout_seconds))
