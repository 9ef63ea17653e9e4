"""Forks: another sample of a prompt begins from the blocks of one that runs.

The target gets a slot on the source's worker and a table that shares all blocks of the common
tokens, the last one too, which is partly full. Common are all prompt tokens but the last: that one
is computed again, so that the target samples a first token of its own. As the target writes into
the partly full block at once, copy-on-write (WorkerState.occupy) gives it a copy in the plan that
admits it. Nobody else is touched: the source goes on writing into its own block, behind the common
tokens, and what the copy holds of that is overwritten before it is read.

Rules:

- a source is ready when the steps that computed the common tokens have returned. Earlier would be
  wrong: a worker that has heard of the source's end before the scheduler leaves out its rows, and
  the target's tokens would be with the client before the hole is seen;
- both have the same prompt and salt, which is compared, and the target has no output yet: one that
  was preempted or has moved is a request like any other;
- one that wants its prompt's logprobs is not forked: each token has to be computed;
- any sample that runs may be the source. When it goes, the next one that was admitted is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core import planner
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.planner import Placement
from scheduler_svc.core.request import Request
from scheduler_svc.core.worker_state import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A sample that another one could begin from, num_common tokens in all, with room for both."""

    worker: WorkerState
    source: Request
    num_common: int

    @property
    def num_confirmed(self) -> int:
        """Common tokens that have been computed."""
        return min(int(self.worker.rows.num_confirmed[self.source.slot]), self.num_common)

    @property
    def is_ready(self) -> bool:
        """Whether the target may begin in the next plan."""
        return self.num_confirmed == self.num_common

    @property
    def num_whole_blocks(self) -> int:
        """Blocks that both keep sharing."""
        return self.num_common // self.worker.capacity.block_size

    @property
    def num_blocks_to_fill(self) -> int:
        """Those of them that the source has not filled yet."""
        return self.num_whole_blocks - self.num_confirmed // self.worker.capacity.block_size

    def placement(self, target: Request) -> Placement:
        """The target's place, if the source is ready."""
        num_shared = self.worker.blocks_for(self.num_common)
        return Placement(
            worker=self.worker,
            shared=self.source.blocks[:num_shared],
            num_cached=self.num_common,
            num_new=self.worker.blocks_for(len(target.token_ids)) - num_shared,
            source=self.source,
        )


def find(request: Request, workers: Sequence[WorkerState], config: CoreConfig) -> Fork | None:
    """The best sample to fork the request from: one that is ready, else the first that runs.

    None if there is none on a worker with room for a slot and one block, a copy or a new one.
    Prompts are compared once the source is ready: a look before that does not cost their length.
    """
    best: Fork | None = None
    for worker in workers:
        sources = worker.samples.get(request.sample_group)
        if not sources or not _may_fork(request, worker) or not planner.has_room(worker, config):
            continue
        for source in sources:
            if source.prompt_len != request.prompt_len:
                continue
            fork = Fork(worker=worker, source=source, num_common=request.prompt_len - 1)
            if not fork.is_ready:
                best = best or fork
            elif _is_same_prompt(request, source):
                return fork
    return best


def _may_fork(request: Request, worker: WorkerState) -> bool:
    num_common = request.prompt_len - 1
    if num_common == 0 or request.num_output_tokens > 0:
        return False
    wants_logprobs = request.sampling.num_logprobs is not None
    return not wants_logprobs or request.num_unscored(worker.session) >= num_common


def _is_same_prompt(request: Request, source: Request) -> bool:
    return (
        request.cache_salt == source.cache_salt
        and request.token_ids == source.token_ids[: source.prompt_len]
    )
