import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.store.arrays import bytes_to_ids, bytes_to_logprobs, count_shared_prefix, ids_to_bytes, logprobs_to_bytes

ids = st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda values: np.array(values, np.int32))
few = st.lists(st.integers(0, 1), max_size=12).map(lambda values: np.array(values, np.int32))


@given(ids)
def test_ids_round_trip(array: np.ndarray) -> None:
    back = bytes_to_ids(ids_to_bytes(array))
    assert back.dtype == np.int32
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_ids_are_little_endian_and_may_be_strided() -> None:
    assert ids_to_bytes(np.array([1, 99, 258], np.int32)[::2]) == b"\x01\0\0\0\x02\x01\0\0"


def test_logprobs_keep_their_bits() -> None:
    bits = np.array([0x7FC00000, 0x7FC00123, 0xFF800000, 0x7F800000, 0x80000000, 0xBDCCCCCD], np.uint32)
    back = bytes_to_logprobs(logprobs_to_bytes(bits.view(np.float32)))
    assert np.array_equal(back.view(np.uint32), bits)


@pytest.mark.parametrize("array", [np.array([1]), np.array([2**40]), np.array([[1]], np.int32), np.array([1.0])])
def test_other_types_are_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError):
        ids_to_bytes(array)


def test_float64_logprobs_are_refused() -> None:
    with pytest.raises(TypeError):
        logprobs_to_bytes(np.array([0.1]))


@given(few, few)
def test_shared_prefix(a: np.ndarray, b: np.ndarray) -> None:
    count = count_shared_prefix(a, b)
    assert list(a[:count]) == list(b[:count])
    assert count in (len(a), len(b)) or a[count] != b[count]
