"""Driving one encode_stream call: read inputs, send them, book what comes back, hand over. Written once for both."""

import grpc

from encserve_client._decode import decode_response
from encserve_client._exceptions import EncserveError, InvalidInputError, ProtocolError
from encserve_client._failure import Failure, failure_of_stream_error
from encserve_client._inputs import check_input, pack_input
from encserve_client._merge import check_expected, check_fingerprint
from encserve_client._options import Array, Options
from encserve_client._stream import StreamBooks
from encserve_client._wire import Event, InputRead, InputsEnded, StreamAnswered, StreamEnded, Wire
from encserve_proto.v1 import encoder_pb2 as pb

Result = Array | EncserveError

_ENDED_EARLY = Failure(grpc.StatusCode.UNAVAILABLE, "the server ended the stream before it had answered everything")


class StreamRun:
    """One encode_stream call. `next` is called by one task or thread, and `aclose` always at the end."""

    def __init__(self, wire: Wire, books: StreamBooks[Array], template: pb.EncodeRequest, options: Options) -> None:
        self._wire = wire
        self._books = books
        self._template = template
        self._options = options
        self._stream = 0  # the one that new requests go to; 0 for none
        self._is_reading = False
        self._inputs_ended = False
        self._paused_seconds = 0.0  # how long the caller has been busy with results
        self._paused_at = wire.now()
        self._fingerprint = template.expected_fingerprint

    async def next(self) -> tuple[int, Result] | None:
        """The next result with its index; None when all are handed over.

        At most one input is read while a result is ready, so that neither waits long for the other.

        Raises:
            EncserveError: The call as a whole failed.
        """
        self._paused_seconds += self._wire.now() - self._paused_at
        try:
            return await self._next()
        finally:
            self._paused_at = self._wire.now()

    async def aclose(self) -> None:
        """Cancels what is still going on."""
        await self._wire.aclose()

    async def _next(self) -> tuple[int, Result] | None:
        books, wire = self._books, self._wire
        may_hand_over = False  # only after one chance to read, so that reading keeps up with handing over
        while True:
            while (event := await wire.wait(0)) is not None:
                self._handle(event)
            books.expire(self._now())
            self._send()
            if may_hand_over or not self._wants_input:
                if (result := books.pop()) is not None:
                    return result
                if self._inputs_ended and books.is_empty:
                    return None
            may_hand_over = True
            if self._wants_input:
                self._is_reading = True
                wire.read_input()
            elif (event := await wire.wait(books.seconds_to_wait(self._now()))) is not None:
                self._handle(event)

    @property
    def _wants_input(self) -> bool:
        return self._books.has_room and not self._inputs_ended and not self._is_reading

    def _now(self) -> float:
        """The clock of the books: without the time that the caller was busy."""
        return self._wire.now() - self._paused_seconds

    def _handle(self, event: Event) -> None:
        if isinstance(event, InputRead):
            self._is_reading = False
            self._add(event.item)
        elif isinstance(event, InputsEnded):
            if event.error is not None:
                raise event.error
            self._is_reading, self._inputs_ended = False, True
        elif isinstance(event, StreamAnswered):
            self._answer(event.response, event.stream)
        elif isinstance(event, StreamEnded):
            if event.stream == self._stream:
                self._stream = 0
            self._books.broke(event.stream, event.failure or _ENDED_EARLY, self._now())

    def _add(self, item: object) -> None:
        name = f"inputs[{self._books.next_index}]"
        request = pb.EncodeRequest()
        request.CopyFrom(self._template)
        try:
            request.inputs.append(pack_input(check_input(item, name), name))
        except InvalidInputError as error:
            self._books.reject(error)  # in its turn, like one that the server refuses
            return
        self._books.add(request, self._now())

    def _send(self) -> None:
        for item in self._books.take(self._now()):
            if not self._stream:
                self._stream = self._wire.open_stream()
            self._books.sent(item, self._stream)
            self._wire.send(self._stream, item.request)

    def _answer(self, response: pb.EncodeStreamResponse, stream: int) -> None:
        item = self._books.item_of(response.request_id)
        if item is None:
            return  # given up already
        if response.HasField("response"):
            self._books.answered(item, self._decode(response.response))
        elif response.HasField("error"):
            failure = failure_of_stream_error(response.error)
            self._books.refused(item, failure, self._now())
            if failure.code is grpc.StatusCode.UNAVAILABLE and stream == self._stream:
                # This server is stopping or failing. The next request gets a new stream, perhaps to another one; this
                # stream still brings its answers.
                self._wire.finish(stream)
                self._stream = 0
        else:
            raise ProtocolError(f"the answer to request {response.request_id} has neither a response nor an error")

    def _decode(self, response: pb.EncodeResponse) -> Array:
        """(rows, d_model) for tokens, (d_model,) if pooled."""
        part = decode_response(response, self._options, 1, describe=False)
        check_expected(self._template.expected_fingerprint, part.fingerprint)
        self._fingerprint = self._fingerprint or part.fingerprint
        check_fingerprint(self._fingerprint, part.fingerprint)
        rows = part.blocks[0].rows
        return rows[0] if self._options.outputs[0].is_pooled else rows
