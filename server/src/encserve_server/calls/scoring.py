"""Answers score calls of any protocol. The documents, pairs or texts of a call run as in an encode call."""

from collections.abc import Callable

from encserve_server.calls.call import Call
from encserve_server.errors import EncserveError
from encserve_server.models.scoring import ScoreCall, Scored, plan_score
from encserve_server.models.served import EncodeReply, ServedModel
from encserve_server.types.arrays import IndexedRows


async def score(
    call: Call, model: ServedModel, request: ScoreCall, build: Callable[[Scored], bytes], more_bytes: int = 0
) -> bytes:
    """Answer a score call.

    Args:
        call: The call.
        model: The model from `Call.resolve`.
        request: The request.
        build: Builds the bytes of the reply. If the outputs of the model are large, the scores and the reply are
            computed in a thread.
        more_bytes: The maximum number of bytes in the reply, if the reply is larger than an array of the scores.

    Raises:
        InvalidField: The model cannot compute the scores of this call.
        EncserveError: See `Call.encode`.
    """
    model.check_counts(request.count)
    plan = plan_score(model.bundle, request)
    if more_bytes:
        call.hold(more_bytes)
    # The outputs stay on the server, so only their own bytes are held.
    queries = inputs = None
    if plan.queries is not None:
        try:
            queries = await call.compute(model, plan.queries, growth=0.0)
        except EncserveError as error:
            error.change_fields(plan.query_of_pair)
            raise
    if plan.inputs is not None:
        inputs = await call.compute(model, plan.inputs, growth=0.0)
    made = [it for it in (queries, inputs) if it is not None]
    sequences = [sequence for it in made for sequence in it.sequences]
    waited = [it.seconds() for it in made]
    queue_seconds, compute_seconds = (max(times) for times in zip(*waited, strict=True))
    call.note(sequences, lambda: (queue_seconds, compute_seconds))

    def build_reply() -> bytes:
        given = () if request.vectors is None else request.vectors.arrays
        scored = plan.scores(_outputs(queries), given if inputs is None else _outputs(inputs))
        scored.queries = () if queries is None else queries.sequences
        scored.sequences = () if inputs is None else inputs.sequences
        scored.tokenize_seconds = sum(it.tokenize_seconds for it in made)
        scored.queue_seconds, scored.compute_seconds = queue_seconds, compute_seconds
        return build(scored)

    output_bytes = sum(it.estimated_bytes for it in made) + _vector_bytes(request)
    return await call.build(model, build_reply, output_bytes, more_bytes=more_bytes)


def _outputs(reply: EncodeReply | None) -> list[object]:
    return [] if reply is None else [it.outputs[0] for it in reply.sequences]


def _vector_bytes(request: ScoreCall) -> int:
    """Return the size of the vectors that the caller sent, at most."""
    if request.vectors is None:
        return 0
    return sum(it.rows.size if isinstance(it, IndexedRows) else it.size for it in request.vectors.arrays) * 4
