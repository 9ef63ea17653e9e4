"""Runs Triton kernels in the interpreter, in a process of its own.

Triton decides between compiler and interpreter when it is first imported, for its own library too.
A process that has imported it can't change its mind, and the variable must not reach other tests:
so a worker process sets it first, builds the case itself and answers with figures.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from tests.kernels.cases import Case, build, expected, plant, worst


def _start() -> None:
    assert "triton" not in sys.modules, "something imported triton before the variable was set"
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def start_interpreter() -> ProcessPoolExecutor:
    """A pool; the caller shuts it down. Its second process starts when two calls run at a time."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, mp_context=context, initializer=_start)


def attention_error(case: Case, fault: str | None = None) -> float:
    """Error of the Triton kernel against the dense float64 answer, in tolerances."""
    from kernels.paged_attention import paged_attention

    tensors = build(case)
    want = expected(case, tensors)
    if fault is not None:
        case, tensors = plant(fault, case, tensors)
    return worst(tensors.call(paged_attention, case), want, case.dtype)


def alone_equals_batched(case: Case) -> bool:
    """True when each row's answer has the same bits in a call of its own."""
    from kernels.paged_attention import paged_attention

    tensors = build(case)
    together = tensors.call(paged_attention, case)
    for row, (query_len, seq_len) in enumerate(case.rows):
        start = int(tensors.query_start_loc[row])
        alone = paged_attention(
            tensors.q[start : start + query_len],
            tensors.k_cache,
            tensors.v_cache,
            tensors.block_tables[row : row + 1],
            tensors.seq_lens[row : row + 1],
            torch.tensor([0, query_len], dtype=torch.int32),
            scale=case.head_dim**-0.5,
            window=case.window,
            max_query_len=query_len,
            max_seq_len=seq_len,
        )
        if not torch.equal(alone, together[start : start + query_len]):
            return False
    return True


def launches_bounded(case: Case, scratch_bytes: int) -> float:
    """The error when scratch is so small that rows are done in several launches."""
    from kernels import paged_attention

    whole = paged_attention.MAX_SCRATCH_BYTES
    paged_attention.MAX_SCRATCH_BYTES = scratch_bytes
    try:
        return attention_error(case)
    finally:
        paged_attention.MAX_SCRATCH_BYTES = whole


def store_differs(
    num_tokens: int, head_dim: int, block_size: int, seed: int, dtype: torch.dtype
) -> bool:
    """True when the Triton store leaves another cache than a loop over tokens does."""
    from kernels.kv_store import store_kv
    from tests.kernels.storing import differs

    return differs(store_kv, num_tokens, head_dim, block_size, seed, dtype)


def refusal(name: str) -> str:
    """The message with which a Triton call refuses a planted mistake."""
    from kernels.kv_store import store_kv
    from kernels.paged_attention import paged_attention
    from tests.kernels.mistakes import message_of

    return message_of(name, paged_attention, store_kv)


def refusal_of_length(max_seq_len: int) -> str:
    """What is said to that greatest length over tables of 48 tokens; "" when it was taken."""
    from kernels.paged_attention import paged_attention

    case = Case(rows=((1, 9), (3, 17)))
    tensors = build(case)
    assert tensors.block_tables.shape[1] * case.block_size == 48
    try:
        tensors.call(paged_attention, case, max_seq_len=max_seq_len)
    except ValueError as error:
        return str(error)
    return ""
