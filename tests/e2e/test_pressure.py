"""A stack short of KV memory gives the tokens of one that has enough, by swap and by recompute."""

import pytest

from benchmarks import pressure
from tests.kernels.native import needs_native
from tests.model_cache import real_model_dir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200), needs_native]


def test_a_third_of_the_memory_changes_no_token() -> None:
    """Half of the requests are sampled, a quarter come over gRPC; the host pool is small."""
    result = pressure.press(
        str(real_model_dir()), clients=16, seconds=60.0, least=5, names=("pool",)
    )
    assert result["problems"] == [], result
