"""Tests of the decoding of replies into arrays.

If a reply is inconsistent, the client raises an error that names the wrong value.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from encserve_client import Output, ProtocolError
from encserve_client._logic.answers import decode_response, merge_answers, sequence_info
from encserve_client.options import Array, DType, Options, OutputKind
from encserve_proto.v1 import encoder_pb2 as pb


def response_of(arrays: list[Array], width: int, dtype: DType = "float32") -> pb.EncodeResponse:
    """Make a reply with these hidden states. Each sequence has one array of shape (n_tokens, width)."""
    is_half = dtype == "float16"
    tensor = pb.RaggedTensor(
        kind=pb.OUTPUT_KIND_TOKENS,
        data_type=pb.DATA_TYPE_FLOAT16 if is_half else pb.DATA_TYPE_FLOAT32,
        width=width,
        lengths=[len(array) for array in arrays],
        data=b"".join(array.astype("<f2" if is_half else "<f4").tobytes() for array in arrays),
    )
    sequences = [pb.SequenceInfo(token_count=len(array)) for array in arrays]
    return pb.EncodeResponse(model="m", model_version="1", fingerprint="f", outputs=[tensor], sequences=sequences)


@given(st.data(), st.integers(1, 5), st.sampled_from(["float32", "float16"]))
def test_ragged_rows_are_decoded_exactly(data: st.DataObject, width: int, dtype: DType) -> None:
    """Arrays of float32 or float16 are decoded bit for bit, including infinities and NaN.

    An array may also have no rows.
    """
    rows = hnp.arrays(np.dtype(dtype), st.tuples(st.integers(0, 6), st.just(width)))
    arrays = data.draw(st.lists(rows, min_size=1, max_size=5))
    options = Options(dtype=dtype)
    wire = response_of(arrays, width, dtype).SerializeToString()
    part = decode_response(pb.EncodeResponse.FromString(wire), options, len(arrays), describe=False)
    [block] = part.outputs[0].blocks
    for got, want in zip(block.split(), arrays, strict=True):
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()
        assert got.dtype == np.dtype(dtype)
        assert got.flags.writeable


def good() -> pb.EncodeResponse:
    """Make a valid reply with two sequences. They have 2 tokens and 1 token, and d_model is 3."""
    return response_of([np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)], 3)


def set_to(path: str, value: object) -> Callable[[pb.EncodeResponse], None]:
    def change(response: pb.EncodeResponse) -> None:
        target: object = response.outputs[0]
        if path == "lengths":
            del response.outputs[0].lengths[:]
            response.outputs[0].lengths.extend(value)  # type: ignore[arg-type]
        else:
            setattr(target, path, value)

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_to("data", b"\0" * 35), r"outputs\[0\].data must have 36 bytes: 3 rows of 3 float32; was 35"),
        (set_to("data", b""), "was 0"),
        (set_to("width", 0), r"outputs\[0\].width must be >= 1; was 0"),
        (set_to("lengths", [3]), r"the answer must have 2 outputs\[0\].lengths; had 1"),
        (set_to("lengths", [1, 2]), r"outputs\[0\].lengths\[0\] must be 2; was 1"),
        (set_to("lengths", [2, 4_000_000_000]), "was 36"),
        (set_to("data_type", pb.DATA_TYPE_FLOAT16), r"data_type must be 1; was 2"),
        (set_to("kind", pb.OUTPUT_KIND_MULTI_VECTOR), r"outputs\[0\].kind must be 'tokens'; was 'multi_vector'"),
        (lambda it: it.outputs.pop(), "the answer must have 1 outputs; had 0"),
        (lambda it: it.sequences.pop(), "the answer must have 2 sequences; had 1"),
    ],
)
def test_an_inconsistent_reply_is_refused(change: Callable[[pb.EncodeResponse], None], text: str) -> None:
    response = good()
    decode_response(response, Options(), 2, describe=True)
    change(response)
    with pytest.raises(ProtocolError, match=text):
        decode_response(response, Options(), 2, describe=True)


def test_a_pooled_output_has_one_row_per_input() -> None:
    response = good()
    response.outputs[0].kind = pb.OUTPUT_KIND_MEAN
    with pytest.raises(ProtocolError, match=r"lengths\[0\] must be 1; was 2"):
        decode_response(response, Options((Output("mean"),)), 2, describe=False)


def test_rows_are_of_length_1_if_the_call_asks() -> None:
    options = Options((Output(l2_normalize=True),))
    response = good()
    with pytest.raises(ProtocolError, match=r"outputs\[0\].l2_normalized must be True; was False"):
        decode_response(response, options, 2, describe=False)
    response.outputs[0].l2_normalized = True
    decode_response(response, options, 2, describe=False)


def test_the_pooling_of_the_model_has_any_kind() -> None:
    response = response_of([np.ones((1, 3), np.float32)] * 2, 3)
    response.outputs[0].kind = pb.OUTPUT_KIND_MEAN
    answer = decode_response(response, Options((Output("model"),)), 2, describe=False)
    assert (answer.outputs[0].kind, answer.outputs[0].l2_normalized) == ("mean", False)


def test_rows_without_special_tokens_may_be_fewer() -> None:
    """If special tokens are excluded, a sequence may have fewer vectors than tokens, but not more."""
    response = good()
    response.sequences[0].token_count = 4
    decode_response(response, Options(exclude_special_tokens=True), 2, describe=False)
    response.sequences[0].token_count = 1
    with pytest.raises(ProtocolError, match=r"lengths\[0\] must be 1; was 2"):
        decode_response(response, Options(exclude_special_tokens=True), 2, describe=False)


def test_sequence_info_is_arrays() -> None:
    message = pb.SequenceInfo(
        token_count=2, original_token_count=5, truncated=True, token_ids=[7, 8], char_starts=[0, 3], char_ends=[0, 6]
    )
    info = sequence_info(message)
    assert (info.token_count, info.original_token_count, info.truncated) == (2, 5, True)
    np.testing.assert_array_equal(info.token_ids, [7, 8])
    np.testing.assert_array_equal(info.offsets, [[0, 0], [3, 6]])
    assert info.special is None
    assert info.tokens is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"token_ids": [1]}, "the answer must have 2 token_ids of a sequence; had 1"),
        ({"special": [True, False, True]}, "must have 2 special of a sequence; had 3"),
        ({"char_starts": [0, 1]}, "must have 2 char_ends of a sequence; had 0"),
    ],
)
def test_sequence_info_of_another_length_is_refused(fields: dict[str, list[int]], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        sequence_info(pb.SequenceInfo(token_count=2, **fields))  # type: ignore[arg-type]


def test_answers_of_one_call_have_one_width() -> None:
    parts = [
        decode_response(response_of([np.ones((2, width), np.float32)], width), Options(), 1, describe=False)
        for width in (3, 4)
    ]
    with pytest.raises(ProtocolError, match=r"the answer must have 3 columns of outputs\[0\]; had 4"):
        merge_answers([([0], parts[0]), ([1], parts[1])], {}, 0.0, 2)


def test_results_are_copies_of_the_messages() -> None:
    """The caller may write to `matrix` and `arrays`, without an effect on the received bytes."""
    part = decode_response(good(), Options(), 2, describe=False)
    one, two = merge_answers([([0, 1], part)], {}, 0.0, 1), merge_answers([([0, 1], part), ([2, 3], part)], {}, 0.0, 2)
    for written in (one.outputs[0].matrix(), one.outputs[0].arrays()[0], two.outputs[0].matrix()):
        written[...] = 7
    assert not (part.outputs[0].blocks[0].rows == 7).any()
    assert two.outputs[0].matrix().shape == (6, 3)
    assert [array.shape for array in two.outputs[0].arrays()] == [(2, 3), (1, 3)] * 2


@pytest.mark.parametrize("kind", ["multi_vector", "sparse"])
def test_the_indices_of_an_answer_without_rows_are_empty(kind: OutputKind) -> None:
    """A reply to a call of two inputs has no rows. Each input gets an empty array of indices, not None."""
    response = response_of([np.ones((0, 1), np.float32)] * 2, 1)
    response.outputs[0].kind = pb.OUTPUT_KIND_SPARSE if kind == "sparse" else pb.OUTPUT_KIND_MULTI_VECTOR
    part = decode_response(response, Options((Output(kind),)), 2, describe=False)
    [output] = merge_answers([([0, 1], part)], {}, 0.0, 1, 10).outputs
    assert [None if it is None else it.tolist() for it in output.token_indices()] == [[], []]
