"""Tokenizing a text of any kind takes time in proportion to its length.

Time is that of the processor, not of the clock, and the least of several tries, of more while it
seems too much: a busy machine makes single figures worse. The exponent is fitted over lengths that
differ 64-fold.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.adapters.tokenizer_hf import HfTokenizer
from gateway.core.prompt import Message
from gateway.rest.bodies import parse
from gateway.rest.schemas import ChatBody
from tests.model_cache import real_model_dir
from tests.unit.gateway.model_folder import model_folder

MAX_EXPONENT = 1.3
LENGTHS = (1_000, 8_000, 64_000)
MIN_TRIES, MAX_TRIES = 2, 8
# What has made tokenizers, their regular expressions and template guards slow elsewhere.
TEXTS: dict[str, Callable[[int], str]] = {
    "one letter": lambda n: "a" * n,
    "letters without a space": lambda n: ("abcdefghij" * n)[:n],
    "spaces": lambda n: " " * n,
    "spaces and then a letter": lambda n: " " * (n - 1) + "a",
    "line ends": lambda n: "\r\n" * (n // 2),
    "apostrophes": lambda n: "'s" * (n // 2),
    "digits": lambda n: "0123456789" * (n // 10),
    "accents upon accents": lambda n: "e" + "\u0301" * (n - 1),
    "joined emoji": lambda n: "👩\u200d" * (n // 2),
    "signs": lambda n: "!?.,;" * (n // 5),
    "private use": lambda n: "\ue000\ue001" * (n // 2),
    "beginnings of control tokens": lambda n: "<|" * (n // 2),
    "whole control tokens": lambda n: ("<|end|>" * n)[:n],
    "overlapping control tokens": lambda n: ("<|end<|end|>|>" * n)[:n],
    "nested brackets": lambda n: "{" * (n // 2) + "}" * (n // 2),
}


def exponent(run: Callable[[str], None], text: Callable[[int], str]) -> float:
    """Of the time, by least squares over the lengths."""
    best_s = dict.fromkeys(LENGTHS, math.inf)
    found = math.inf
    for num_tries in range(MAX_TRIES):
        if num_tries >= MIN_TRIES and found <= MAX_EXPONENT:
            break
        for length in LENGTHS:
            begin_s = time.process_time()
            run(text(length))
            best_s[length] = min(best_s[length], time.process_time() - begin_s)
        found = slope(best_s)
    return found


def slope(time_s: dict[int, float]) -> float:
    """Of the time over the lengths, both as logarithms."""
    # What takes no time at all can't be told from nothing.
    points = [(math.log(length), math.log(found_s + 2e-4)) for length, found_s in time_s.items()]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return rise / sum((x - mean_x) ** 2 for x, _ in points)


def assert_in_proportion(folder: Path, text: Callable[[int], str]) -> None:
    """As a prompt, as a message put through the template, and as a body of JSON."""
    tokenizer = HfTokenizer(folder, threads=1)

    def prompt(given: str) -> None:
        asyncio.run(_encoded(tokenizer, given))

    def message(given: str) -> None:
        asyncio.run(_chatted(tokenizer, given))

    found = {run.__name__: exponent(run, text) for run in (prompt, message, body)}
    tokenizer.close()
    assert max(found.values()) <= MAX_EXPONENT, found


async def _encoded(tokenizer: HfTokenizer, text: str) -> None:
    await tokenizer.encode_text(text)


async def _chatted(tokenizer: HfTokenizer, text: str) -> None:
    await tokenizer.encode_chat([Message(role="user", content=text)])


def body(text: str) -> None:
    """Read and checked."""
    data = json.dumps({"messages": [{"role": "user", "content": text}], "stop": [text]}).encode()
    parse(data, ChatBody).to_raws(client_id="")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TEXTS)
def test_time_grows_with_the_length(name: str) -> None:
    """Of a byte-level vocabulary made on the spot."""
    assert_in_proportion(model_folder(), TEXTS[name])


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TEXTS)
def test_time_grows_with_the_length_for_the_real_model(name: str) -> None:
    """Its tokenizer splits texts by a regular expression first."""
    assert_in_proportion(real_model_dir(), TEXTS[name])
