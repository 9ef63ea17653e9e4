"""A request as the core sees it: a few integers and the known tokens."""

from array import array
from dataclasses import dataclass, field

from scheduler_svc.core.account import Account, WaitBook
from scheduler_svc.core.lifecycle import TRANSITIONS, Move, RequestState, after
from scheduler_svc.core.tenants import Tenant
from scheduler_svc.core.types import (
    MAX_ATTEMPT,
    NO_SLOT,
    BlockHash,
    BlockId,
    PrefixStop,
    RequestId,
    SamplingSpec,
    Slot,
    WorkerId,
)

Rank = tuple[int, int]
NO_HASH = BlockHash(b"")


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request. Mutated by the scheduler only.

    token_ids are prompt and confirmed output. What has been computed stands in the rows of the
    worker that it runs on. attempt is the live one; entry_attempt is what the queue entry says,
    lower if the core has moved the request since. num_in_flight counts the unreturned steps that
    have a row of a returning request.
    """

    request_id: RequestId
    entry_id: str
    entry_attempt: int
    attempt: int
    gateway_id: str
    reply_to: bytes
    # 32-bit numbers: a block's tokens are named and compared as bytes.
    token_ids: "array[int]"
    prompt_len: int
    sampling: SamplingSpec
    tenant: Tenant
    deadline_ns: int | None
    cache_salt: bytes
    traceparent: str
    # Place in the order, from class and arrival; lower goes first. See policy.
    rank: Rank
    arrived_ns: int
    # Output position that the last admission emits from; the next one, if there was none.
    emit_from: int
    # Samples of one prompt have one group and differ in the index; no group, no other samples.
    sample_group: bytes = b""
    sample_index: int = 0

    state: RequestState = RequestState.WAITING
    worker_id: WorkerId | None = None
    slot: Slot = NO_SLOT
    blocks: list[BlockId] = field(default_factory=list)
    # Names of the full blocks for one block size, and the parent of the first.
    block_hashes: list[BlockHash] = field(default_factory=list)
    hashed_block_size: int = 0
    chain_start: BlockHash = NO_HASH
    num_published: int = 0
    num_in_flight: int = 0
    max_total_tokens: int = 0
    # The worker session whose outbox holds what has been emitted; another one must emit anew.
    emitted_by: int | None = None
    num_known_at_admission: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_skips: int = 0
    num_holds: int = 0
    # The last block it is held back for, and what had changed so far when it had no room.
    held_for: BlockHash | None = None
    had_no_room_at: tuple[tuple[int, int], ...] | None = None
    # Where the last look at the workers would have it, if not on that whose step was planned.
    cheapest_at: WorkerId | None = None
    num_uncached_there: int = 0
    # Workers lost in all; workers lost and steps failed since its last token.
    num_workers_lost: int = 0
    num_losses: int = 0
    num_failed_steps: int = 0
    tokens_at_loss: int = -1
    # It may be what its workers died of; not reset by a token, see still_suspect.
    is_suspect: bool = False
    stranded_since_ns: int | None = None
    waits: WaitBook = field(default_factory=WaitBook)
    prefix_stop: PrefixStop | None = None
    # Since when it has no token because it lost its blocks, and whether by a preemption.
    set_back_since_ns: int | None = None
    was_preempted: bool = False
    preempted_ns: int = 0
    set_back_ns: int = 0
    num_moves: int = 0
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    # Its known tokens have been charged to the tenant.
    is_charged: bool = False

    @property
    def sequence(self) -> int:
        """The how many'th arrival it was."""
        return self.rank[1]

    @property
    def is_spent(self) -> bool:
        """Its next worker would need an attempt above MAX_ATTEMPT."""
        return self.attempt + (self.emitted_by is not None) > MAX_ATTEMPT

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output."""
        return len(self.token_ids) - self.prompt_len

    def emission_start(self, session: int) -> int:
        """Output position that a worker session would emit from, admitted to it now.

        The session that emitted before still delivers through its outbox if it is this one. Any
        other may have died with tokens unsent: everything is repeated. A repeat goes out with the
        first token sampled after it, so a row that gave none has left it to the next.
        """
        if self.emitted_by is None:
            return self.emit_from
        if self.emitted_by != session:
            return 0
        given = len(self.token_ids) > self.num_known_at_admission
        return self.num_output_tokens if given else self.emit_from

    def num_unscored(self, session: int) -> int:
        """With logprobs: leading tokens whose logits are not wanted, so that a cache may hold them.

        Logits after a token give the logprobs of the next one.
        """
        start = self.emission_start(session)
        if self.sampling.prompt_logprobs and start == 0:
            return 0
        return self.prompt_len - 1 + start

    def move(self, move: Move) -> None:
        """Changes the state by the table; `after` says what is illegal."""
        self.state = TRANSITIONS.get((self.state, move)) or after(self.state, move)

    def take_over(self, old: "Request") -> None:
        """This one supersedes `old`: it keeps its place in the order and its account."""
        self.rank, self.arrived_ns = old.rank, old.arrived_ns
        self.attempt = max(self.attempt, old.attempt + 1)
        self.is_charged = old.is_charged
        self.waits, self.num_skips = old.waits, old.num_skips
        self.num_preemptions, self.num_swaps = old.num_preemptions, old.num_swaps
        self.num_moves, self.num_workers_lost = old.num_moves, old.num_workers_lost
        self.preempted_ns, self.set_back_ns = old.preempted_ns, old.set_back_ns
        if len(old.token_ids) == old.tokens_at_loss:
            # What kills its workers must not begin to count anew by being asked for again.
            self.tokens_at_loss = len(self.token_ids)
            self.num_losses, self.num_failed_steps = old.num_losses, old.num_failed_steps
            self.is_suspect = old.is_suspect

    def set_back(self, now_ns: int, *, preempted: bool) -> None:
        """It has lost its blocks. What comes on top before its next token is the same set-back."""
        if self.set_back_since_ns is None:
            self.set_back_since_ns = now_ns
            self.was_preempted = preempted

    def end_set_back(self, now_ns: int) -> None:
        """It has its next token, or has ended."""
        if self.set_back_since_ns is None:
            return
        duration_ns = now_ns - self.set_back_since_ns
        if self.was_preempted:
            self.preempted_ns += duration_ns
        else:
            self.set_back_ns += duration_ns
        self.set_back_since_ns = None

    def count_loss(self) -> int:
        """It has lost its worker: the how many'th one since its last token."""
        self._count_anew_after_a_token()
        self.num_losses += 1
        self.num_workers_lost += 1
        return self.num_losses

    def count_failed_step(self) -> int:
        """A step with it has failed: the how many'th one since its last token."""
        self._count_anew_after_a_token()
        self.num_failed_steps += 1
        return self.num_failed_steps

    def still_suspect(self) -> bool:
        """Whether it is a suspect; a token since its last loss clears it."""
        self.is_suspect = self.is_suspect and len(self.token_ids) == self.tokens_at_loss
        return self.is_suspect

    def _count_anew_after_a_token(self) -> None:
        if len(self.token_ids) != self.tokens_at_loss:
            self.tokens_at_loss = len(self.token_ids)
            self.num_losses = self.num_failed_steps = 0

    def account(self, now_ns: int, overtaken_ns: int | None) -> Account:
        """Its account up to now; what is open is booked."""
        if self.set_back_since_ns is not None:
            since_ns, preempted = now_ns, self.was_preempted
            self.end_set_back(now_ns)
            self.set_back(since_ns, preempted=preempted)
        return Account(
            waited=self.waits.until(now_ns, overtaken_ns),
            preempted_ns=self.preempted_ns,
            set_back_ns=self.set_back_ns,
            num_moves=self.num_moves,
            num_skips=self.num_skips,
            num_swaps=self.num_swaps,
            prefix_stop=self.prefix_stop,
        )

    def forget_work(self) -> None:
        """Nothing is computed any more."""
        self.num_published = 0
        self.blocks = []
        self.slot = NO_SLOT
        self.worker_id = None
