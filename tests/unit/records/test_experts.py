import base64

import numpy as np
import pytest

from polar.records.experts import decode_experts, encode_experts, from_wire, to_wire

ROUTED = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)  # of a call with five tokens


def test_what_is_written_is_read() -> None:
    for found in (decode_experts(encode_experts(ROUTED), 5), from_wire(to_wire(ROUTED), 5)):
        assert found is not None
        assert found.dtype == np.uint8
        assert found.tolist() == ROUTED.tolist()


def test_a_row_for_the_last_token_is_left_out() -> None:
    found = decode_experts(encode_experts(ROUTED), 4)
    assert found is not None
    assert found.tolist() == ROUTED[:3].tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no file of numbers",
        encode_experts(ROUTED)[:90],
        encode_experts(ROUTED[:3]),  # too few
        encode_experts(np.concatenate([ROUTED, ROUTED])),  # too many
        encode_experts(ROUTED).replace(b"(4, 3, 2)", b"(4, 3, 9)"),
        encode_experts(ROUTED).replace(b"(4, 3, 2), ", b"(9**22,),  "),
        b"PK\x03\x04",
        encode_experts(ROUTED).replace(b"}", b" "),
        encode_experts(ROUTED).replace(b"False", b"[1:2]"),
        encode_experts(ROUTED[:, 0]),
        encode_experts(ROUTED.astype(np.float32)),
        base64.b64encode(encode_experts(ROUTED)),
    ],
)
def test_what_does_not_fit(data: bytes) -> None:
    assert decode_experts(data, 5) is None
