"""Events and Ready as text: one line each, equal for equal values in every process.

Fields that are empty or hold their default are left out; sets and mappings are sorted; bytes are
shown as ASCII where they are printable and in hexadecimal otherwise; a long row of numbers is shown
as its beginning, its length and a checksum.
"""

import enum
import zlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass

from scheduler_svc.core.events import Event
from scheduler_svc.core.ready import Ready

_MAX_SHOWN = 16


def event_line(event: Event) -> str:
    """An event: its name and fields."""
    return _value(event)


def ready_lines(ready: Ready) -> Iterator[str]:
    """A Ready: a line for each thing to do, in the order in which it is to be done."""
    for plan in ready.plans:
        yield f"plan {_fields(plan)}"
    for finish in ready.finishes:
        yield f"finish {_fields(finish)}"
    if ready.discards:
        yield f"discards {_value(ready.discards)}"
    if ready.given_up:
        yield f"given_up {_value(ready.given_up)}"
    if ready.wake_at_ns is not None:
        yield f"wake_at_ns {ready.wake_at_ns}"


def _fields(value: object) -> str:
    assert is_dataclass(value)
    shown = []
    for field in fields(value):
        item = getattr(value, field.name)
        is_default = field.default is not MISSING and item == field.default
        if not is_default and item is not False and item not in ((), b"", "", None):
            shown.append(f"{field.name}={_value(item)}")
    return " ".join(shown)


def _value(value: object) -> str:
    match value:
        case enum.Enum():
            return value.name
        case bytes():
            text = value.decode("ascii", errors="replace")
            return text if text.isprintable() and value.isascii() else f"0x{value.hex()}"
        case str() | int() | float() | None:
            return str(value)
        case tuple() | list() if len(value) > _MAX_SHOWN and isinstance(value[0], int):
            sum_ = zlib.crc32(repr(value).encode())
            return f"({_items(value[:4])},..{len(value)} #{sum_:08x})"
        case tuple() | list():
            return f"({_items(value)})"
        case AbstractSet():
            return "{" + ",".join(sorted(_value(item) for item in value)) + "}"
        case Mapping():
            pairs = sorted((_value(key), _value(item)) for key, item in value.items())
            return "{" + ",".join(f"{key}:{item}" for key, item in pairs) + "}"
    return f"{type(value).__name__}({_fields(value)})"


def _items(values: Iterable[object]) -> str:
    return ",".join(_value(item) for item in values)
