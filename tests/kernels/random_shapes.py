"""Random mixes of rows that every attention is held to."""

import torch
from hypothesis import strategies as st

from tests.kernels.cases import Case


@st.composite
def random_cases(
    draw: st.DrawFn,
    max_len: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> Case:
    """Any mix of rows up to max_len tokens, in one of the dtypes."""
    row = st.integers(1, max_len).flatmap(
        lambda s: st.tuples(st.one_of(st.just(1), st.integers(1, s)), st.just(s))
    )
    num_kv_heads = draw(st.integers(1, 3))
    return Case(
        rows=tuple(draw(st.lists(row, min_size=1, max_size=6))),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3, 4, 8))),
        head_dim=draw(st.sampled_from((16, 64, 80, 96, 128, 192, 256))),
        block_size=draw(st.sampled_from((4, 5, 8, 16, 32, 64, 128))),
        window=draw(st.one_of(st.just(0), st.integers(1, max_len + 2))),
        softcap=draw(st.sampled_from((0.0, 10.0))),
        sinks=draw(st.booleans()),
        extra_tokens=draw(st.integers(0, 3)),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )
