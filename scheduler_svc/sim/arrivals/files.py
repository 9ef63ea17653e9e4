"""Recorded traffic: Quire's own JSON lines, the Azure traces' CSV, the Mooncake traces' JSON lines.

Files are read line by line, each pass anew; a line that does not fit raises ArrivalError with file,
line and field. Lines are at most MAX_LINE_BYTES long, a file holds at most MAX_ARRIVALS, and times
never go back.

Own:       {"quire_arrivals": 1, "prefix_block_tokens": 64}
           {"at": 0.25, "num_prompt_tokens": 300, "num_output_tokens": 40, "tenant": "a",
            "prefix_ids": [7, 8], "priority": 0}        (the last three may be left out)
Azure:     TIMESTAMP,ContextTokens,GeneratedTokens      (2023-11-16 18:15:46.6805900,374,44)
Mooncake:  {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
           (milliseconds; an id for each 512 tokens of the prompt, the last may be part of a block)

Azure's times count from its first request, which is the trace's beginning.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from scheduler_svc.sim.arrivals.arrival import Arrival, ArrivalError, Source, problem

MAX_LINE_BYTES = 1 << 20
MAX_ARRIVALS = 50_000_000
MOONCAKE_BLOCK_TOKENS = 512
# Azure's traces share nothing; the number matters to nobody.
AZURE_BLOCK_TOKENS = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_OWN_MARK = "quire_arrivals"
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,9})?(\+00:00)?")

# An arrival's fields as the recorders call them, for messages.
_AZURE_NAMES = {
    "at": "TIMESTAMP",
    "num_prompt_tokens": "ContextTokens",
    "num_output_tokens": "GeneratedTokens",
}
_MOONCAKE_NAMES = {
    "at": "timestamp",
    "num_prompt_tokens": "input_length",
    "num_output_tokens": "output_length",
    "prefix_ids": "hash_ids",
}

# A line's arrival; raises _BadFieldError.
_Parser = Callable[[str], Arrival]


class _BadFieldError(Exception):
    """A line's field, and what is wrong with it."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")


def open_source(path: Path) -> Source:
    """A file of any of the three kinds, told by its first line."""
    line = _first_line(path)
    if line == AZURE_HEADER:
        return read_azure(path)
    if f'"{_OWN_MARK}"' in line:
        return read_own(path)
    if '"hash_ids"' in line:
        return read_mooncake(path)
    raise ArrivalError(
        f"{path}: line 1: neither Azure's header {AZURE_HEADER}, nor {_OWN_MARK}, nor hash_ids"
    )


def read_own(path: Path) -> Source:
    """Quire's own JSON lines; the first one says how many tokens a prefix id stands for."""
    try:
        head = _object(_first_line(path), {_OWN_MARK, "prefix_block_tokens"}, set())
        if _integer(head, _OWN_MARK) != 1:
            raise _BadFieldError(_OWN_MARK, "a version that is not known here")
        block_tokens = _integer(head, "prefix_block_tokens")
    except _BadFieldError as bad:
        raise ArrivalError(f"{path}: line 1: {bad}") from None
    return _source(path, block_tokens, lambda: _own_arrival, {}, num_head_lines=1)


def read_azure(path: Path) -> Source:
    """The CSV of the Azure LLM inference traces. One tenant, no prefixes."""
    if _first_line(path) != AZURE_HEADER:
        raise ArrivalError(f"{path}: line 1: the header is not {AZURE_HEADER}")
    return _source(path, AZURE_BLOCK_TOKENS, _azure_parser, _AZURE_NAMES, num_head_lines=1)


def read_mooncake(path: Path) -> Source:
    """The JSON lines of the Mooncake traces. One tenant."""
    return _source(
        path, MOONCAKE_BLOCK_TOKENS, lambda: _mooncake_arrival, _MOONCAKE_NAMES, num_head_lines=0
    )


def write(path: Path, source: Source) -> int:
    """Writes Quire's own JSON lines; returns how many arrivals there were."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as out:
        head = {_OWN_MARK: 1, "prefix_block_tokens": source.prefix_block_tokens}
        out.write(json.dumps(head) + "\n")
        for arrival in source:
            line: dict[str, Any] = {
                "at": arrival.at,
                "num_prompt_tokens": arrival.num_prompt_tokens,
                "num_output_tokens": arrival.num_output_tokens,
            }
            if arrival.tenant:
                line["tenant"] = arrival.tenant
            if arrival.prefix_ids:
                line["prefix_ids"] = list(arrival.prefix_ids)
            if arrival.priority:
                line["priority"] = arrival.priority
            out.write(json.dumps(line) + "\n")
            count += 1
    return count


# Lines


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            for _, line in _lines(path, file):
                return line
    except OSError as error:
        raise ArrivalError(f"{path}: {error.strerror or error}") from error
    raise ArrivalError(f"{path}: line 1: the file is empty")


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Numbered from 1, without their ends; empty ones are passed over."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise ArrivalError(f"{path}: line {number}: longer than {MAX_LINE_BYTES} bytes")
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ArrivalError(f"{path}: line {number}: not UTF-8") from error
        if line:
            yield number, line


def _source(
    path: Path,
    block_tokens: int,
    new_parser: Callable[[], _Parser],
    names: dict[str, str],
    *,
    num_head_lines: int,
) -> Source:
    def passes() -> Iterator[Arrival]:
        parse = new_parser()
        count, before = 0, 0.0
        with path.open("rb") as file:
            for number, line in itertools.islice(_lines(path, file), num_head_lines, None):
                try:
                    arrival = parse(line)
                    wrong = problem(arrival, block_tokens)
                    if wrong is None and arrival.at < before:
                        wrong = "at", f"{arrival.at} s is before that of the line above"
                    if wrong is not None:
                        raise _BadFieldError(names.get(wrong[0], wrong[0]), wrong[1])
                except _BadFieldError as bad:
                    raise ArrivalError(f"{path}: line {number}: {bad}") from None
                count += 1
                if count > MAX_ARRIVALS:
                    raise ArrivalError(f"{path}: line {number}: more than {MAX_ARRIVALS} requests")
                before = arrival.at
                yield arrival

    return Source(name=path.name, prefix_block_tokens=block_tokens, passes=passes)


def _object(line: str, needed: set[str], others: set[str]) -> dict[str, Any]:
    """A JSON object with these fields; unknown ones are refused, never ignored."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadFieldError("JSON", str(error)) from None
    if not isinstance(value, dict):
        raise _BadFieldError("JSON", "not an object")
    for field in sorted(needed - value.keys()):
        raise _BadFieldError(field, "missing")
    for field in sorted(value.keys() - needed - others):
        raise _BadFieldError(field, "not known here")
    return value


def _integer(of: dict[str, Any], field: str) -> int:
    value = of[field]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BadFieldError(field, f"{value!r} is no integer")
    return value


def _seconds(of: dict[str, Any], field: str) -> float:
    value = of[field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadFieldError(field, f"{value!r} is no number")
    return float(value)


def _ids(of: dict[str, Any], field: str) -> tuple[int, ...]:
    value = of[field]
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise _BadFieldError(field, "no list of integers")
    return tuple(value)


def _own_arrival(line: str) -> Arrival:
    of = _object(
        line,
        {"at", "num_prompt_tokens", "num_output_tokens"},
        {"tenant", "prefix_ids", "priority"},
    )
    tenant = of.get("tenant", "")
    if not isinstance(tenant, str):
        raise _BadFieldError("tenant", "no text")
    return Arrival(
        at=_seconds(of, "at"),
        num_prompt_tokens=_integer(of, "num_prompt_tokens"),
        num_output_tokens=_integer(of, "num_output_tokens"),
        tenant=tenant,
        prefix_ids=_ids(of, "prefix_ids") if "prefix_ids" in of else (),
        priority=_integer(of, "priority") if "priority" in of else 0,
    )


def _mooncake_arrival(line: str) -> Arrival:
    of = _object(line, {"timestamp", "input_length", "output_length", "hash_ids"}, set())
    return Arrival(
        at=_seconds(of, "timestamp") / 1e3,
        num_prompt_tokens=_integer(of, "input_length"),
        num_output_tokens=_integer(of, "output_length"),
        prefix_ids=_ids(of, "hash_ids"),
    )


def _azure_parser() -> _Parser:
    """Of one pass: its first line is its beginning."""
    began: tuple[datetime, float] | None = None

    def parse(line: str) -> Arrival:
        nonlocal began
        cells = line.split(",")
        if len(cells) != 3:
            raise _BadFieldError("TIMESTAMP", f"{len(cells)} columns instead of 3")
        when = _timestamp(cells[0])
        if began is None:
            began = when
        counts = []
        for field, cell in zip(("ContextTokens", "GeneratedTokens"), cells[1:], strict=True):
            if not cell.isascii() or not cell.isdigit() or len(cell) > 12:
                raise _BadFieldError(field, f"{cell[:20]!r} is no count")
            counts.append(int(cell))
        return Arrival(
            at=round((when[0] - began[0]).total_seconds() + when[1] - began[1], 7),
            num_prompt_tokens=counts[0],
            num_output_tokens=counts[1],
        )

    return parse


def _timestamp(cell: str) -> tuple[datetime, float]:
    """Whole seconds and the fraction, whose seventh digit a datetime would lose."""
    found = _TIMESTAMP.fullmatch(cell)
    if found is None:
        raise _BadFieldError("TIMESTAMP", f"{cell[:40]!r} is not like 2023-11-16 18:15:46.6805900")
    try:
        whole = datetime.fromisoformat(found[1])
    except ValueError as error:
        raise _BadFieldError("TIMESTAMP", str(error)) from None
    return whole, float(found[2] or 0.0)
