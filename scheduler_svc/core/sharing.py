"""Prefix sharing between requests of one worker: which blocks a request may start from.

A block enters the index on the result that filled it, never on the plan.
"""

from collections.abc import Sequence
from itertools import islice, takewhile

from scheduler_svc.core import prefix
from scheduler_svc.core.blocks import CachedBlock, PrefixMatch
from scheduler_svc.core.request import Request
from scheduler_svc.core.types import BlockHash, BlockId, PrefixStop
from scheduler_svc.core.worker_state import WorkerState


class PrefixSharing:
    """Names blocks of requests and finds them again. Holds no state but its configuration."""

    def __init__(self, *, enabled: bool, hash_key: bytes, hash_bytes: int) -> None:
        self._enabled = enabled
        self._hash_key = hash_key
        self._hash_bytes = hash_bytes

    def match(self, request: Request, worker: WorkerState) -> PrefixMatch:
        """Cached blocks of the request's prefix; at least one token is left to compute.

        Where logprobs are wanted, all tokens whose logits give them are left.
        """
        if not self._enabled:
            return PrefixMatch(blocks=[], stop=PrefixStop.OFF)
        names, size = request.block_hashes, worker.capacity.block_size
        if (
            names
            and request.hashed_block_size == size
            and len(request.token_ids) > size
            and request.sampling.num_logprobs is None
        ):
            why = worker.pool.why_missing(names[0])
            if why is not None:
                return PrefixMatch(blocks=[], stop=why)  # mostly, on most of many workers
        num_usable = self._num_usable(request, worker)
        if num_usable == 0:
            short = len(request.token_ids) <= size
            stop = PrefixStop.SHORT if short else PrefixStop.LOGPROBS
            return PrefixMatch(blocks=[], stop=stop)
        return worker.pool.match(
            islice(request.block_hashes, num_usable),
            request.chain_start,
            lambda index: _tokens_of(request, size, index),
        )

    def is_cold(self, request: Request, worker: WorkerState) -> bool:
        """That `match` finds no block there is known without it; says nothing if False."""
        names = request.block_hashes
        return not self._enabled or (
            bool(names)
            and request.hashed_block_size == worker.capacity.block_size
            and not worker.pool.has(names[0])
        )

    def coming(self, request: Request, worker: WorkerState, num_cached: int) -> list[BlockHash]:
        """Names after the num_cached blocks of blocks that running requests are about to fill."""
        coming, names = worker.coming, request.block_hashes
        if not coming:
            return []
        is_named = request.hashed_block_size == worker.capacity.block_size
        if is_named and (num_cached >= len(names) or names[num_cached] not in coming):
            return []  # mostly
        usable = islice(names, num_cached, self._num_usable(request, worker))
        return list(takewhile(coming.__contains__, usable))

    def announce(self, request: Request, worker: WorkerState) -> None:
        """The request, just admitted, will fill the blocks of its known tokens."""
        if not self._enabled:
            return
        names, size = request.block_hashes, worker.capacity.block_size
        if request.hashed_block_size != size or len(names) < len(request.token_ids) // size:
            self._name_blocks(request, size)  # mostly `match` has
        for name in names[request.num_published :]:
            worker.coming.setdefault(name, request)

    def inherit(self, request: Request, source: Request, worker: WorkerState) -> None:
        """The request has the prompt of `source`, which runs on the worker: the same names."""
        if self._enabled and request.hashed_block_size != worker.capacity.block_size:
            num_full = request.prompt_len // worker.capacity.block_size
            request.block_hashes = source.block_hashes[:num_full]
            request.hashed_block_size = source.hashed_block_size
            request.chain_start = source.chain_start

    def _num_usable(self, request: Request, worker: WorkerState) -> int:
        """Named blocks that the request may start from."""
        size = worker.capacity.block_size
        self._name_blocks(request, size)
        num_usable = (len(request.token_ids) - 1) // size
        if request.sampling.num_logprobs is not None:
            num_usable = min(num_usable, request.num_unscored(worker.session) // size)
        return num_usable

    def publish(
        self, worker: WorkerState, requests: Sequence[Request], num_full: Sequence[int]
    ) -> None:
        """Puts blocks that are full and confirmed, num_full of each request, into the index.

        Requests were named for the worker's block size when they were announced.
        """
        if not self._enabled:
            return
        size, coming, child = worker.capacity.block_size, worker.coming, prefix.child
        filled: list[tuple[BlockId, CachedBlock]] = []
        for request, end in zip(requests, num_full, strict=True):
            names, tokens, blocks = request.block_hashes, request.token_ids, request.blocks
            for index in range(request.num_published, end):
                parent = names[index - 1] if index else request.chain_start
                content = tokens[index * size : (index + 1) * size].tobytes()
                if index == len(names):
                    name = child(parent, content)
                    names.append(name)
                else:
                    name = names[index]
                    coming.pop(name, None)
                    worker.num_prompt_blocks += 1
                filled.append((blocks[index], (name, parent, content)))
            request.num_published = end
        worker.pool.publish(filled)

    def _name_blocks(self, request: Request, block_size: int) -> None:
        """Names all full blocks of known tokens. Workers may differ in block size."""
        if request.hashed_block_size == block_size:
            if (len(request.block_hashes) + 1) * block_size > len(request.token_ids):
                return
        else:
            request.block_hashes.clear()
            request.hashed_block_size = block_size
            request.chain_start = prefix.chain_start(
                self._hash_key, request.cache_salt, self._hash_bytes
            )
        prefix.extend_chain(
            request.block_hashes, request.chain_start, request.token_ids, block_size
        )


def _tokens_of(request: Request, block_size: int, index: int) -> bytes:
    return request.token_ids[index * block_size : (index + 1) * block_size].tobytes()
