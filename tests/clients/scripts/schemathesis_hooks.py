"""Keeps what schemathesis generates cheap: a valid request must not decode for minutes.

Counts of output tokens and of samples that are in range become small ones, and one is given where
the default is large. A deadline that is in range becomes one that can be met: 504 is the right
answer to others. Wrong values go as they were generated.
"""

from typing import Any

import schemathesis

MAX_TOKENS = 4
MAX_SAMPLES = 2
DEADLINE_MS = 60_000
NAMES = ("max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Changes the body of a request just before it is sent."""
    body = case.body
    if not isinstance(body, dict):
        return
    _lower(body)
    if "messages" in body and not any(body.get(name) is not None for name in NAMES[:2]):
        # Without a count a chat goes on to the end of the context.
        body["max_tokens"] = MAX_TOKENS
    if "inputs" in body and body.get("parameters") is None:
        # TGI's default is 100.
        body["parameters"] = {}
    if isinstance(body.get("parameters"), dict):
        _lower(body["parameters"])
        if isinstance(body.get("inputs"), str) and body["parameters"].get(NAMES[2]) is None:
            body["parameters"][NAMES[2]] = MAX_TOKENS


def _lower(fields: dict[str, Any]) -> None:
    for name in NAMES:
        value = fields.get(name)
        if type(value) is int and 0 < value < 2**31:
            fields[name] = min(value, MAX_TOKENS)
    samples = fields.get("n")
    if type(samples) is int and MAX_SAMPLES < samples <= 128:
        fields["n"] = MAX_SAMPLES
    deadline = fields.get("deadline_ms")
    if type(deadline) is int and 0 < deadline < DEADLINE_MS:
        fields["deadline_ms"] = DEADLINE_MS
