"""Generated classes to the gateway's values and back; the only module that opens them."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from quire.v1 import common_pb2, inference_pb2, queue_pb2, worker_pb2

from gateway.core.output import Chunk
from gateway.core.prompt import Message
from gateway.core.requests import RawRequest
from gateway.core.types import (
    FinishReason,
    LogprobRows,
    Notice,
    QueuedRequest,
    RequestId,
    Sampling,
    TokenBatch,
    TokenLogprob,
    Usage,
    WorkerRecord,
)
from gateway.core.validation import check_lengths

__all__ = ["DecodeError"]


def _sampling(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias_token_ids=[token for token, _ in sampling.logit_bias],
        logit_biases=[bias for _, bias in sampling.logit_bias],
        num_logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def encode_request(request: QueuedRequest, gateway_id: str, reply_to: bytes) -> bytes:
    """A queue entry that brings a request."""
    queued = queue_pb2.QueuedRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        gateway_id=gateway_id,
        reply_to=reply_to,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=_sampling(request.sampling),
        priority=request.priority,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight,
        sample_index=request.sample_index,
        sample_group=request.sample_group,
    )
    return queue_pb2.QueueEntry(request=queued).SerializeToString()


def encode_cancel(request_id: RequestId) -> bytes:
    """A queue entry that ends a request."""
    cancel = queue_pb2.QueuedCancel(request_id=request_id)
    return queue_pb2.QueueEntry(cancel=cancel).SerializeToString()


def encode_gateway(gateway_id: str) -> bytes:
    """The registry's record of this gateway."""
    return queue_pb2.GatewayRecord(gateway_id=gateway_id).SerializeToString()


def decode_notice(data: bytes) -> Notice:
    """Raises DecodeError."""
    notice = queue_pb2.Notice.FromString(data)
    return Notice(
        request_id=RequestId(notice.request_id),
        attempt=notice.attempt,
        finish_reason=_finish_reason(notice.finish_reason),
        message=notice.message,
    )


def decode_worker(data: bytes) -> WorkerRecord:
    """Raises DecodeError."""
    record = queue_pb2.WorkerRecord.FromString(data)
    return WorkerRecord(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        address=record.address,
        model_digest=record.model_digest,
        max_model_len=record.max_model_len,
    )


def subscribe(
    gateway_id: str, reply_to: bytes, incarnation: int, last_sequence: int
) -> worker_pb2.TokensRequest:
    """First message to a worker."""
    return worker_pb2.TokensRequest(
        subscribe=worker_pb2.Subscribe(
            gateway_id=gateway_id,
            reply_to=reply_to,
            incarnation=incarnation,
            last_sequence=last_sequence,
        )
    )


def acknowledge(sequence: int) -> worker_pb2.TokensRequest:
    """Batches up to here have been received."""
    return worker_pb2.TokensRequest(acknowledge=worker_pb2.Acknowledge(sequence=sequence))


def cancel_row(request_id: RequestId) -> worker_pb2.TokensRequest:
    """A client is gone."""
    return worker_pb2.TokensRequest(cancel=worker_pb2.CancelRow(request_id=request_id))


def subscribed_gap(message: worker_pb2.TokensResponse) -> bool | None:
    """Of a Subscribed message whether it names a gap; None for any other message."""
    return message.subscribed.gap if message.HasField("subscribed") else None


def decode_batch(message: worker_pb2.TokensResponse) -> TokenBatch | None:
    """The batch in a message. Raises DecodeError if its columns do not fit each other."""
    if not message.HasField("batch"):
        return None
    batch = message.batch
    attempts = list(batch.attempts)
    num_tokens = list(batch.num_tokens)
    columns = (batch.first_positions, num_tokens, batch.finish_reasons, batch.num_cached_tokens)
    if any(len(column) != len(attempts) for column in columns):
        raise DecodeError("columns of a batch differ in length")
    if len(batch.request_ids) != 16 * len(attempts) or sum(num_tokens) != len(batch.token_ids):
        raise DecodeError("a batch's ids or tokens do not fit its columns")
    return TokenBatch(
        sequence=batch.sequence,
        request_ids=batch.request_ids,
        attempts=attempts,
        first_positions=list(batch.first_positions),
        num_tokens=num_tokens,
        token_ids=list(batch.token_ids),
        finish_reasons=list(batch.finish_reasons),
        num_cached_tokens=list(batch.num_cached_tokens),
        logprobs=_logprobs(batch.logprobs, num_tokens) if batch.logprobs else {},
    )


def _logprobs(
    messages: Iterable[worker_pb2.TokenLogprobs], num_tokens: Sequence[int]
) -> dict[int, LogprobRows]:
    """Rows by entry, as arrays: a prompt's may be many."""
    found: dict[int, LogprobRows] = {}
    for message in messages:
        if message.entry >= len(num_tokens) or message.entry in found:
            raise DecodeError("logprobs of a batch name an entry that is not there, or one twice")
        num_rows = message.num_prompt_rows + num_tokens[message.entry]
        num_top = num_rows * message.num_top
        if len(message.logprobs) != num_rows:
            raise DecodeError("logprobs of a batch do not fit its tokens")
        if len(message.top_token_ids) != num_top or len(message.top_logprobs) != num_top:
            raise DecodeError("top logprobs of a batch do not fit its tokens")
        found[message.entry] = LogprobRows(
            num_prompt_rows=message.num_prompt_rows,
            logprobs=array("f", message.logprobs),
            num_top=message.num_top,
            top_token_ids=array("I", message.top_token_ids),
            top_logprobs=array("f", message.top_logprobs),
        )
    return found


# Fields of GenerateRequest that are named alike in RawRequest, None there where they are not set.
_NULLABLE = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "priority",
    "deadline_ms",
    "cache_salt",
    "user",
    "n",
)
# And those that are true where they are not set.
_TRUE_UNLESS_SET = ("skip_special_tokens", "add_special_tokens", "add_generation_prompt")


def check_generate(request: inference_pb2.GenerateRequest) -> None:
    """A message of a few bytes an entry can hold millions: they are counted before they are read.

    Raises RequestRejected.
    """
    check_lengths(
        num_messages=len(request.messages.messages),
        num_prompt_ids=len(request.token_ids.ids),
        num_stops=len(request.stop),
        num_stop_tokens=len(request.stop_token_ids),
        num_biases=len(request.logit_bias),
    )


def decode_generate(
    request: inference_pb2.GenerateRequest, *, tenant: str = "", traceparent: str = ""
) -> RawRequest:
    """What a gRPC client asked for."""
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in (*_NULLABLE, *_TRUE_UNLESS_SET)
        if request.HasField(name)  # type: ignore[arg-type]
    }
    prompt = request.WhichOneof("prompt")
    messages = [Message(role=m.role, content=m.content) for m in request.messages.messages]
    return RawRequest(
        model=request.model,
        text=request.text if prompt == "text" else None,
        # Read by the validator, once their number has been found good.
        token_ids=request.token_ids.ids if prompt == "token_ids" else None,
        messages=messages if prompt == "messages" else None,
        logit_bias=dict(request.logit_bias),
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        echo=request.echo,
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        continue_final_message=request.continue_final_message,
        client_request_id=request.client_request_id,
        tenant=tenant,
        traceparent=traceparent,
        **given,
    )


def started(request_id: str, client_request_id: str) -> inference_pb2.GenerateResponse:
    """First event of an answer."""
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=request_id, client_request_id=client_request_id[:128]
        )
    )


def echo(
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob] | None,
    token_bytes: Callable[[int], bytes],
    *,
    first: bool,
) -> inference_pb2.GenerateResponse:
    """A piece of the prompt; logprobs, None if they are not wanted, lack the very first token's."""
    rows = []
    if logprobs is not None:
        if first:
            token = token_ids[0]
            rows.append(inference_pb2.TokenLogprob(token_id=token, token=token_bytes(token)))
        rows += [_token_logprob(entry, token_bytes) for entry in logprobs]
    return inference_pb2.GenerateResponse(
        echo=inference_pb2.Echo(text=text, token_ids=token_ids, logprobs=rows)
    )


def delta(
    chunk: Chunk, token_bytes: Callable[[int], bytes], sample_index: int
) -> inference_pb2.GenerateResponse:
    """A piece of an answer."""
    rows = [_token_logprob(entry, token_bytes) for entry in chunk.logprobs]
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(text=chunk.text, token_ids=chunk.token_ids, logprobs=rows),
        sample_index=sample_index,
    )


def _token_logprob(
    entry: TokenLogprob, token_bytes: Callable[[int], bytes]
) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=entry.token_id,
        token=token_bytes(entry.token_id),
        logprob=entry.logprob,
        top=[
            inference_pb2.TopLogprob(token_id=i, token=token_bytes(i), logprob=logprob)
            for i, logprob in entry.top
        ],
    )


def finished(
    reason: FinishReason, message: str, usage: Usage | None, sample_index: int
) -> inference_pb2.GenerateResponse:
    """Last event of a sample; the last of all has the usage."""
    found = None
    if usage is not None:
        found = common_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )
    return inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            finish_reason=common_pb2.FinishReason.ValueType(reason), usage=found, message=message
        ),
        sample_index=sample_index,
    )


def models(name: str, max_model_len: int) -> inference_pb2.ListModelsResponse:
    """The one model served."""
    model = inference_pb2.Model(id=name, max_model_len=max_model_len)
    return inference_pb2.ListModelsResponse(models=[model])


def cancel_response(found: bool) -> inference_pb2.CancelResponse:
    """Answer to Cancel."""
    return inference_pb2.CancelResponse(found=found)


def _finish_reason(value: int) -> FinishReason:
    try:
        return FinishReason(value)
    except ValueError:
        # A newer scheduler's reason.
        return FinishReason.ERROR
