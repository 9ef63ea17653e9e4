"""From an arrival to the request that the core keeps."""

from array import array

from scheduler_svc.core import policy
from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import Tenant


def new_request(
    event: RequestArrived, *, tenant: Tenant, held: int, now_ns: int, sequence: int, ageing_ns: int
) -> Request:
    """The sequence'th arrival. `held` is the highest attempt that may still deliver tokens."""
    prompt_len = len(event.prompt_token_ids)
    return Request(
        request_id=event.request_id,
        entry_id=event.entry_id,
        entry_attempt=event.attempt,
        attempt=max(event.attempt, held + 1),
        gateway_id=event.gateway_id,
        reply_to=event.reply_to,
        token_ids=array("I", event.prompt_token_ids + event.output_token_ids),
        prompt_len=prompt_len,
        sampling=event.sampling,
        tenant=tenant,
        deadline_ns=event.deadline_ns,
        cache_salt=event.cache_salt,
        traceparent=event.traceparent,
        rank=policy.rank(
            priority=event.priority, arrived_ns=now_ns, sequence=sequence, ageing_ns=ageing_ns
        ),
        arrived_ns=now_ns,
        emit_from=len(event.output_token_ids),
        sample_group=event.sample_group,
        sample_index=event.sample_index,
        max_total_tokens=prompt_len + event.sampling.max_tokens,
    )
