"""What tests of the native kernels share: the mark, and the libraries of this machine."""

import pytest

from kernels.native import library

REASON = library.reason_unavailable()
needs_native = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")


def instruction_sets() -> list[str]:
    """Those that run here; one placeholder where there are no native kernels at all."""
    return library.usable(library.flags_of_this_machine()) if REASON is None else ["none"]
