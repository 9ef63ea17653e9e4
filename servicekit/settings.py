"""Settings: one catalogue, read once at start from flags and QUIRE_* variables.

Owns parsing and its errors. A name that no service knows, or a malformed value, stops the process
with the name in the message. A name known to another service is accepted and ignored.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "QUIRE_"


class SettingsError(Exception):
    """A setting is unknown, malformed or out of range; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `default` is a value after parsing; `services` says who reads it."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    unit: str
    help: str
    services: frozenset[str]


def text(raw: str) -> str:
    """Any text without surrounding space."""
    return raw.strip()


def boolean(raw: str) -> bool:
    """1, true, yes, on / 0, false, no, off."""
    word = raw.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be one of 1, 0, true, false, yes, no, on, off")


def _number_of(kind: Callable[[str], Any], raw: str, what: str) -> Any:
    try:
        return kind(raw)
    except ValueError as error:
        raise ValueError(f"must be {what}") from error


def integer(low: int, high: int) -> Callable[[str], int]:
    """A whole number in [low, high]."""

    def parse(raw: str) -> int:
        value: int = _number_of(int, raw, "a whole number")
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """A finite number in [low, high]."""

    def parse(raw: str) -> float:
        value: float = _number_of(float, raw, "a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"must be from {low} to {high}")
        return value

    return parse


def choice(*words: str, aliases: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """One of the words, or an alias of one."""

    def parse(raw: str) -> str:
        word = raw.strip().lower()
        word = (aliases or {}).get(word, word)
        if word not in words:
            raise ValueError("must be one of " + ", ".join(words))
        return word

    return parse


def load(
    service: str,
    catalogue: Sequence[Setting],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """The values of one service. Flags win over variables, variables over defaults.

    An empty variable is a variable that is not set. Raises SettingsError.
    """
    known = {PREFIX + s.name.upper(): s for s in catalogue}
    raw: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise SettingsError(f"{variable}: no Quire service knows this setting")
        if value != "":
            raw[known[variable].name] = value
    mine = [s for s in catalogue if service in s.services]
    raw.update(_flags(service, mine, argv))
    values: dict[str, Any] = {}
    for setting in mine:
        if setting.name not in raw:
            values[setting.name] = setting.default
            continue
        try:
            values[setting.name] = setting.parse(raw[setting.name])
        except ValueError as error:
            shown = raw[setting.name][:60]
            raise SettingsError(f"{PREFIX}{setting.name.upper()}={shown!r}: {error}") from error
    return values


def _flags(service: str, mine: Sequence[Setting], argv: Sequence[str]) -> dict[str, str]:
    parser = argparse.ArgumentParser(
        prog=f"python -m {service}",
        description="Every setting is also read from the variable in brackets; flags win.",
        allow_abbrev=False,
    )
    for setting in mine:
        unit = f", {setting.unit}" if setting.unit else ""
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            dest=setting.name,
            metavar="V",
            help=f"{setting.help} (default: {setting.default}{unit}) "
            f"[{PREFIX}{setting.name.upper()}]".replace("%", "%%"),
        )
    return {k: v for k, v in vars(parser.parse_args(list(argv))).items() if v is not None}
