"""Keeps what schemathesis generates cheap: a valid request must not decode for minutes."""

from typing import Any

import schemathesis

MAX_TOKENS = 4
NAMES = ("max_tokens", "max_completion_tokens", "max_new_tokens")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Lowers the counts of output tokens that are in range, and gives one where none stands.

    Wrong values stay as they were generated.
    """
    if not isinstance(body, dict):
        return body
    _lower(body)
    path = context.operation.path
    if path == "/v1/chat/completions":
        # Without a count a chat goes on to the end of the context.
        if not any(name in body for name in NAMES):
            body["max_tokens"] = MAX_TOKENS
    elif isinstance(body.get("parameters"), dict):
        _lower(body["parameters"])
    return body


def _lower(fields: dict[str, Any]) -> None:
    for name in NAMES:
        value = fields.get(name)
        if type(value) is int and 0 < value < 2**31:
            fields[name] = min(value, MAX_TOKENS)
    value = fields.get("min_tokens")
    if type(value) is int and 0 < value < 2**31:
        fields["min_tokens"] = min(value, MAX_TOKENS)
