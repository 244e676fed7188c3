"""What a header says is what its receiver reads, and bytes that no rank wrote are no header."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.overlap.faults import _DTYPES, _LANES, _OPERATIONS, _SCHEDULES, Header

HOST = torch.device("cpu")
headers = st.builds(
    Header,
    operation=st.sampled_from(_OPERATIONS),
    call=st.integers(0, 2**64 - 1),
    lane=st.sampled_from(_LANES),
    step=st.integers(0, 2**32 - 1),
    shape=st.lists(st.integers(0, 2**63 - 1), max_size=6).map(tuple),
    dtype=st.sampled_from(_DTYPES),
    num_subslices=st.integers(1, 2**32 - 1),
    schedule=st.sampled_from(_SCHEDULES),
    gradients=st.lists(st.booleans(), max_size=64).map(tuple),
    keep_gathered=st.booleans(),
)


@given(headers)
def test_what_is_packed_is_unpacked(header: Header) -> None:
    packed = header.pack(HOST)
    assert packed.shape == Header.blank(HOST).shape == (80,)
    assert Header.unpack(packed) == header


@given(headers, st.sampled_from([0, 1, 2, 3]), st.integers(len(_OPERATIONS), 255))
def test_a_place_that_is_in_no_table_is_refused(header: Header, place: int, value: int) -> None:
    packed = header.pack(HOST)
    packed[place] = value
    with pytest.raises(ValueError, match="no rank of this version writes"):
        Header.unpack(packed)
