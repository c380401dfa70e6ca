import base64

import numpy as np
import pytest

from polar.experts import from_wire, read, to_wire, written

ROUTED = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)  # of a call with five tokens


def test_what_is_written_is_read() -> None:
    for found in (read(written(ROUTED), 5), from_wire(to_wire(ROUTED), 5)):
        assert found is not None
        assert found.dtype == np.uint8
        assert found.tolist() == ROUTED.tolist()


def test_a_row_for_the_last_token_is_left_out() -> None:
    found = read(written(ROUTED), 4)
    assert found is not None
    assert found.tolist() == ROUTED[:3].tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no file of numbers",
        written(ROUTED)[:90],
        written(ROUTED[:3]),  # too few
        written(np.concatenate([ROUTED, ROUTED])),  # too many
        written(ROUTED).replace(b"(4, 3, 2)", b"(4, 3, 9)"),
        written(ROUTED).replace(b"(4, 3, 2), ", b"(9**22,),  "),
        b"PK\x03\x04",
        written(ROUTED).replace(b"}", b" "),
        written(ROUTED).replace(b"False", b"[1:2]"),
        written(ROUTED[:, 0]),
        written(ROUTED.astype(np.float32)),
        base64.b64encode(written(ROUTED)),
    ],
)
def test_what_does_not_fit(data: bytes) -> None:
    assert read(data, 5) is None
