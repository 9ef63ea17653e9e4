"""Generated classes to the gateway's values and back; the only module that opens them."""

from google.protobuf.message import DecodeError
from quire.v1 import common_pb2, inference_pb2, queue_pb2, worker_pb2

from gateway.core.output import Chunk
from gateway.core.prompt import Message
from gateway.core.types import (
    FinishReason,
    Notice,
    QueuedRequest,
    RequestId,
    Sampling,
    TokenBatch,
    Usage,
    WorkerRecord,
)
from gateway.core.validation import RawRequest

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
    )


def decode_generate(request: inference_pb2.GenerateRequest) -> RawRequest:
    """What a gRPC client asked for."""

    def optional(name: str) -> bool:
        return request.HasField(name)  # type: ignore[arg-type]

    prompt = request.WhichOneof("prompt")
    messages = [Message(role=m.role, content=m.content) for m in request.messages.messages]
    return RawRequest(
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=list(request.token_ids.ids) if prompt == "token_ids" else None,
        messages=messages if prompt == "messages" else None,
        max_tokens=request.max_tokens if optional("max_tokens") else None,
        temperature=request.temperature if optional("temperature") else None,
        top_p=request.top_p if optional("top_p") else None,
        top_k=request.top_k if optional("top_k") else None,
        seed=request.seed if optional("seed") else None,
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens if optional("min_tokens") else None,
        priority=request.priority if optional("priority") else None,
        client_request_id=request.client_request_id,
    )


def started(request_id: str, client_request_id: str) -> inference_pb2.GenerateResponse:
    """First event of an answer."""
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=request_id, client_request_id=client_request_id[:128]
        )
    )


def delta(chunk: Chunk) -> inference_pb2.GenerateResponse:
    """A piece of an answer."""
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(text=chunk.text, token_ids=chunk.token_ids)
    )


def finished(reason: FinishReason, message: str, usage: Usage) -> inference_pb2.GenerateResponse:
    """Last event of an answer."""
    return inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            finish_reason=common_pb2.FinishReason.ValueType(reason),
            usage=common_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            ),
            message=message,
        )
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
