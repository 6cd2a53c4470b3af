"""Tests of calls with vectors as inputs.

The tests cover how messages contain vectors, how calls are split into messages, and which arrays are refused.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_encoder import Caller, FakeEncoder
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from encserve_client import InvalidInputError
from encserve_client._logic.planning import Limits, cost_of
from encserve_client.inputs import check_input, pack_input
from encserve_proto.v1 import encoder_pb2 as pb

NO_LIMITS = Limits(2**31, 2**31, 2**31, 512)
SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 12))
FINITE = {"allow_nan": False, "allow_infinity": False}
finite_arrays = hnp.arrays(np.float16, SHAPES, elements=FINITE) | hnp.arrays(np.float32, SHAPES, elements=FINITE)


def vectors(n_tokens: int, width: int = 8, dtype: Any = np.float32) -> npt.NDArray[Any]:
    """Make an array of shape (n_tokens, width). All its numbers differ, and float16 represents them exactly."""
    return (np.arange(n_tokens * width) / 8).reshape(n_tokens, width).astype(dtype)


def pack(array: npt.NDArray[Any]) -> pb.TokenEmbeddings:
    """Convert an array to the protobuf message that the client sends."""
    return pack_input(check_input(array, "inputs[0]"), "inputs[0]").embeddings


def read(message: pb.TokenEmbeddings) -> npt.NDArray[Any]:
    """Convert a protobuf message to the array that a server reads."""
    dtype = {pb.DATA_TYPE_FLOAT32: "<f4", pb.DATA_TYPE_FLOAT16: "<f2"}[message.data_type]
    return np.frombuffer(message.data, dtype).reshape(-1, message.width)


@given(finite_arrays)
def test_numbers_arrive_bit_for_bit(array: npt.NDArray[Any]) -> None:
    got = read(pack(array))
    assert (got.dtype.itemsize, got.shape) == (array.dtype.itemsize, array.shape)
    assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        vectors(3).astype(">f4"),
        vectors(8, 3).T.copy().T,
        vectors(6)[::2],
        vectors(3, 16)[:, ::2],
        vectors(3)[::-1, ::-1],
        vectors(3).astype(">f2"),
        np.ma.masked_array(vectors(3), mask=vectors(3) > 1),
    ],
    ids=["big-endian", "columns first", "every other row", "every other column", "reversed", "big-endian half", "mask"],
)
def test_byte_order_and_strides_do_not_change_the_sent_bytes(array: npt.NDArray[Any]) -> None:
    np.testing.assert_array_equal(read(pack(array)), np.asarray(array))


def test_float64_is_rounded_to_float32() -> None:
    array = np.array([[1 / 3, -0.0, 1e-300, float(np.finfo(np.float32).max)]])
    message = pack(array)
    assert (message.data_type, message.width) == (pb.DATA_TYPE_FLOAT32, 4)
    np.testing.assert_array_equal(read(message), array.astype(np.float32))
    assert np.signbit(read(message)[0, 1])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_error_of_a_nonfinite_number_has_row_and_column(dtype: Any, value: float) -> None:
    array = vectors(5, 4, dtype)
    array[3, 0] = array[2, 3] = value
    with pytest.raises(InvalidInputError) as caught:
        pack_input(array, "inputs[7]")
    assert str(caught.value) == f"inputs[7] must be finite; was {value:g} in row 2, column 3"


@pytest.mark.parametrize("value", [1e39, -1e300, sys.float_info.max])
def test_the_error_of_a_number_too_large_for_float32_has_row_and_column(value: float) -> None:
    array = vectors(5, 4, np.float64)
    array[1, 2] = value
    with pytest.raises(
        InvalidInputError,
        match=r"^inputs\[7\] must have a magnitude of at most 3.40282e\+38, to fit into float32; was .* in row 1, col",
    ):
        pack_input(array, "inputs[7]")


@pytest.mark.parametrize(("dtype", "n_bytes"), [(np.float16, 2), (np.float32, 4), (np.float64, 4)])
def test_tokens_and_bytes_are_counted_exactly(dtype: Any, n_bytes: int) -> None:
    """The plan counts each vector as one token.

    The planned size of the request exceeds the size of the numbers by at most 32 bytes.
    """
    message = pack_input(vectors(100, 96, dtype), "inputs[0]")
    tokens, request_bytes = cost_of(message, NO_LIMITS)
    assert tokens == 100
    assert 100 * 96 * n_bytes < request_bytes <= 100 * 96 * n_bytes + 32
    tokens, _ = cost_of(pack_input(vectors(600), "inputs[0]"), NO_LIMITS)
    assert tokens == 512  # the server truncates or refuses longer inputs


async def test_vectors_get_their_rows(caller: Caller, service: FakeEncoder) -> None:
    """`token_vectors`, `embed` and `run` accept vectors, even if a call needs several messages."""
    service.max_request_sequences = 2
    service.model_info = pb.ModelInfo(input_kind=pb.INPUT_KIND_EMBEDDINGS)
    client = caller.connect()
    arrays = [vectors(n, dtype=dtype) for n, dtype in ((1, np.float32), (5, np.float16), (3, np.float64))]
    for got, want in zip(await caller(client.token_vectors, arrays), arrays, strict=True):
        np.testing.assert_array_equal(got, want)
    pooled = await caller(client.embed, arrays, pooling="cls")
    np.testing.assert_array_equal(pooled, [array[0] for array in arrays])
    result = await caller(client.run, np.stack([vectors(4)] * 3))
    assert [info.token_count for info in result.sequences] == [4, 4, 4]
    assert result.sequences[0].token_ids is None
    types = [item.embeddings.data_type for request in service.requests[:2] for item in request.inputs][:3]
    assert types == [pb.DATA_TYPE_FLOAT32, pb.DATA_TYPE_FLOAT16, pb.DATA_TYPE_FLOAT32]
