"""Trace files: all that went into a core and all that came out, as text.

    quire-trace 1
    C {...}      the core's configuration, JSON
    E {...}      an event, JSON: its type and the fields that differ from their defaults
    R ...        a line of the Ready that followed, as in core.trace
    .            the round's end
    - ...        the recording was stopped, and why; nothing follows

A file begins with a new core, so the events alone give every Ready again. reply_to, the secret by
which gateways read tokens, is left out on both sides; prompts are in it.
"""

import enum
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

from scheduler_svc.core import CoreConfig, Ready, events
from scheduler_svc.core.events import Event, RequestArrived
from scheduler_svc.core.trace import ready_lines

FIRST_LINE = "quire-trace 1"
_EVENTS: Mapping[str, type] = {kind.__name__: kind for kind in typing.get_args(events.Event)}


class TraceError(Exception):
    """Not a trace; the text says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Events and the lines of the Ready after them. `line` is where the round begins.

    Of a round that broke off, `ready` is None.
    """

    line: int
    events: tuple[Event, ...]
    ready: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole file. `stopped` is the reason that its last line gives."""

    config: CoreConfig
    rounds: tuple[Round, ...]
    stopped: str | None


# Writing


def config_line(config: CoreConfig) -> str:
    """The line of a configuration."""
    return f"C {_dumps(_plain(config))}"


def event_lines(fed: Iterable[Event]) -> Iterator[str]:
    """A line for each event."""
    for event in fed:
        if isinstance(event, RequestArrived):
            event = replace(event, reply_to=b"")  # noqa: PLW2901
        yield f"E {_dumps({'type': type(event).__name__, **_plain(event)})}"


def answer_lines(ready: Ready) -> Iterator[str]:
    """The lines of a Ready."""
    plans = tuple(
        replace(plan, admits=tuple(replace(admit, reply_to=b"") for admit in plan.admits))
        if plan.admits
        else plan
        for plan in ready.plans
    )
    for line in ready_lines(replace(ready, plans=plans)):
        yield f"R {line}".replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _plain(value: object) -> Any:
    """A value as JSON knows it, equal for equal values in every process."""
    match value:
        case enum.Enum():
            return value.name
        case bytes():
            return value.hex()
        case None | str() | int() | float():
            return value
        case tuple() | list():
            return [_plain(item) for item in value]
        case AbstractSet():
            return sorted(_plain(item) for item in value)
        case Mapping():
            return {str(_plain(key)): _plain(item) for key, item in value.items()}
    assert is_dataclass(value)
    plain = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if field.default is MISSING or item != field.default:
            plain[field.name] = _plain(item)
    return plain


# Reading


def read(lines: Iterable[str]) -> Trace:
    """Parses a file's lines. Raises TraceError."""
    config: CoreConfig | None = None
    rounds: list[Round] = []
    fed: list[Event] = []
    answer: list[str] = []
    begin, stopped = 0, None
    for number, raw in enumerate(lines, start=1):
        line = raw.rstrip("\n")
        if number == 1:
            if line != FIRST_LINE:
                raise TraceError(f"line 1: not {FIRST_LINE!r}")
            continue
        try:
            match line[:2]:
                case "C ":
                    config = _value(CoreConfig, json.loads(line[2:]))
                case "E ":
                    begin = begin or number
                    plain = json.loads(line[2:])
                    fed.append(_value(_EVENTS[plain.pop("type")], plain))
                case "R ":
                    answer.append(line)
                case ".":
                    rounds.append(Round(line=begin, events=tuple(fed), ready=tuple(answer)))
                    fed, answer, begin = [], [], 0
                case "- ":
                    stopped = line[2:]
                case _:
                    raise TraceError(f"line {number}: neither event nor answer")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if not raw.endswith("\n"):
                break  # the process ended while it wrote this line
            raise TraceError(f"line {number}: {type(error).__name__}: {error}") from error
    if config is None:
        raise TraceError("there is no configuration")
    if fed:
        rounds.append(Round(line=begin, events=tuple(fed), ready=None))
    return Trace(config=config, rounds=tuple(rounds), stopped=stopped)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(kind: Any, plain: Any) -> Any:
    """The value of a type that `_plain` wrote."""
    if isinstance(kind, typing.NewType):
        return _value(kind.__supertype__, plain)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if plain is None else _value(arguments[0], plain)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_value(arguments[0], item) for item in plain)
        return tuple(_value(part, item) for part, item in zip(arguments, plain, strict=True))
    if origin is frozenset:
        return frozenset(_value(arguments[0], item) for item in plain)
    if origin is Mapping:
        key, item = arguments
        return {_value(key, k): _value(item, v) for k, v in plain.items()}
    if is_dataclass(kind):
        hints, build = _hints(kind), typing.cast(Callable[..., Any], kind)  # type: ignore[arg-type]
        return build(**{name: _value(hints[name], item) for name, item in plain.items()})
    if issubclass(kind, enum.Enum):
        return kind[plain]
    return bytes.fromhex(plain) if kind is bytes else kind(plain)
