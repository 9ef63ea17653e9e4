"""Recorded traffic: what each kind of file says, and that a bad line is named."""

from pathlib import Path

import pytest

from scheduler_svc.sim import arrivals
from scheduler_svc.sim.arrivals import Arrival, ArrivalError, Source

# The columns of the Azure LLM inference traces, with their seven digits and their missing last end.
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:16:50.9951691,1020,1"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}\n'
)
OWN = (
    '{"quire_arrivals": 1, "prefix_block_tokens": 16}\n'
    '{"at": 0.5, "num_prompt_tokens": 40, "num_output_tokens": 3}\n'
    "\n"
    '{"at": 0.75, "num_prompt_tokens": 40, "num_output_tokens": 9, "tenant": "a", '
    '"prefix_ids": [4, 5], "priority": -1}\n'
)


def written(folder: Path, name: str, text: str) -> Path:
    """A file with that text."""
    path = folder / name
    path.write_bytes(text.encode())
    return path


def error_of(path: Path) -> str:
    """What is said of a file that can't be read to its end."""
    with pytest.raises(ArrivalError) as caught:
        list(arrivals.open_source(path))
    return str(caught.value)


def test_azures_times_count_from_its_first_request(tmp_path: Path) -> None:
    """To the seventh digit, across the minute; it names no prefixes."""
    source = arrivals.read_azure(written(tmp_path, "azure.csv", AZURE))
    assert list(source) == [
        Arrival(0.0, 374, 44),
        Arrival(4.314579, 396, 109),
        Arrival(64.3145791, 1020, 1),
    ]


def test_mooncakes_ids_name_blocks_of_512_tokens(tmp_path: Path) -> None:
    """Its times are milliseconds."""
    source = arrivals.read_mooncake(written(tmp_path, "mooncake.jsonl", MOONCAKE))
    assert source.prefix_block_tokens == 512
    assert list(source) == [
        Arrival(0.0, 700, 5, prefix_ids=(0, 1)),
        Arrival(1.5, 1024, 7, prefix_ids=(0, 2)),
    ]


def test_own_lines_leave_out_what_is_usual(tmp_path: Path) -> None:
    """Tenant, prefix and priority; empty lines are passed over."""
    source = arrivals.read_own(written(tmp_path, "own.jsonl", OWN))
    assert source.prefix_block_tokens == 16
    assert list(source) == [
        Arrival(0.5, 40, 3),
        Arrival(0.75, 40, 9, "a", (4, 5), -1),
    ]


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", AZURE), ("m.jsonl", MOONCAKE), ("o.jsonl", OWN)]
)
def test_what_was_read_can_be_written_and_read_again(tmp_path: Path, name: str, text: str) -> None:
    """As Quire's own lines, whatever it was; the kind is told by the first line."""
    source = arrivals.open_source(written(tmp_path, name, text))
    copy = tmp_path / "copy.jsonl"
    assert arrivals.write(copy, source) == len(list(source))
    again = arrivals.open_source(copy)
    assert again.prefix_block_tokens == source.prefix_block_tokens
    assert list(again) == list(source)


def test_a_source_can_be_passed_over_again(tmp_path: Path) -> None:
    """Two passes side by side do not take each other's lines."""
    source = arrivals.open_source(written(tmp_path, "own.jsonl", OWN))
    one, two = iter(source), iter(source)
    assert next(one) == next(two)
    assert list(one) == list(two) != []


def test_a_pass_reads_no_further_than_it_is_asked(tmp_path: Path) -> None:
    """A line that is broken matters to those who come to it."""
    path = written(tmp_path, "m.jsonl", MOONCAKE + "nonsense\n")
    passing = iter(arrivals.open_source(path))
    assert [next(passing).at, next(passing).at] == [0.0, 1.5]
    with pytest.raises(ArrivalError, match="line 3"):
        next(passing)


HEAD, GOOD = MOONCAKE.splitlines()[0], '"output_length": 5, "hash_ids": [0]}\n'


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("[]", "JSON"),
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 5}', "hash_ids: missing"),
        ('{"timestamp": 9, "input_length": 5, "colour": 1, ' + GOOD, "colour: not known"),
        ('{"timestamp": 9, "input_length": 5.5, ' + GOOD, "input_length"),
        ('{"timestamp": 9, "input_length": true, ' + GOOD, "input_length"),
        ('{"timestamp": 9, "input_length": 0, ' + GOOD, "input_length"),
        ('{"timestamp": 9, "input_length": 999999999, ' + GOOD, "input_length"),
        ('{"timestamp": "9", "input_length": 5, ' + GOOD, "timestamp"),
        ('{"timestamp": NaN, "input_length": 5, ' + GOOD, "timestamp"),
        ('{"timestamp": -1, "input_length": 5, ' + GOOD, "timestamp"),
        ('{"timestamp": 1e300, "input_length": 5, ' + GOOD, "timestamp"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 0, "hash_ids": [0]}', "output_len"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 5, "hash_ids": [0, 1]}', "hash_ids"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 5, "hash_ids": [-1]}', "hash_ids"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 5, "hash_ids": [true]}', "hash_ids"),
        ('{"timestamp": 9, "input_length": 5, "output_length": 5, "hash_ids": 0}', "hash_ids"),
    ],
)
def test_a_bad_line_of_mooncakes_is_named(tmp_path: Path, line: str, field: str) -> None:
    """With file, line and the field as the file calls it."""
    path = written(tmp_path, "m.jsonl", f"{HEAD}\n{line}\n")
    assert error_of(path).startswith(f"{path}: line 2: {field}")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("2023-11-16 18:15:46,374", "TIMESTAMP: 2 columns"),
        ("2023-11-16 18:15:46,374,44,1", "TIMESTAMP: 4 columns"),
        ("16.11.2023 18:15,374,44", "TIMESTAMP"),
        ("2023-13-16 18:15:46,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:45.9,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:47,-374,44", "ContextTokens"),
        ("2023-11-16 18:15:47,,44", "ContextTokens"),
        ("2023-11-16 18:15:47,\N{SUPERSCRIPT TWO},44", "ContextTokens"),
        ("2023-11-16 18:15:47,374,0", "GeneratedTokens"),
        ("2023-11-16 18:15:47,374,4.5", "GeneratedTokens"),
        ("2023-11-16 18:15:47,374," + "9" * 5_000, "GeneratedTokens"),
    ],
)
def test_a_bad_line_of_azures_is_named(tmp_path: Path, line: str, field: str) -> None:
    """A time before the first one's, too."""
    head = "\n".join(AZURE.splitlines()[:2])
    path = written(tmp_path, "a.csv", f"{head}\n{line}\n")
    assert error_of(path).startswith(f"{path}: line 3: {field}")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('"num_prompt_tokens": 5, "num_output_tokens": 5, "tenant": 1}', "tenant"),
        (f'"num_prompt_tokens": 5, "num_output_tokens": 5, "tenant": "{"a" * 257}"}}', "tenant"),
        ('"num_prompt_tokens": 5, "num_output_tokens": 5, "priority": "high"}', "priority"),
        ('"num_prompt_tokens": 5, "num_output_tokens": 5, "priority": 1000001}', "priority"),
        ('"num_prompt_tokens": 17, "num_output_tokens": 5, "prefix_ids": [1, 2, 3]}', "prefix_ids"),
        ('"num_output_tokens": 5}', "num_prompt_tokens: missing"),
    ],
)
def test_a_bad_own_line_is_named(tmp_path: Path, line: str, field: str) -> None:
    """A prompt can't have more blocks than it has tokens for."""
    path = written(tmp_path, "own.jsonl", OWN + '{"at": 1.0, ' + line + "\n")
    assert error_of(path).startswith(f"{path}: line 5: {field}")


def test_times_never_go_back(tmp_path: Path) -> None:
    """Equal ones are fine: requests come together."""
    line = '{"at": 0.75, "num_prompt_tokens": 1, "num_output_tokens": 1}\n'
    assert len(list(arrivals.open_source(written(tmp_path, "own.jsonl", OWN + line)))) == 3
    path = written(tmp_path, "back.jsonl", OWN + line.replace("0.75", "0.74"))
    assert error_of(path).startswith(f"{path}: line 5: at: 0.74 s is before")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: the file is empty"),
        ("a,b\n", "line 1: neither"),
        ('{"quire_arrivals": 2, "prefix_block_tokens": 16}\n', "line 1: quire_arrivals"),
        ('{"quire_arrivals": 1}\n', "line 1: prefix_block_tokens"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "line 1: neither"),
        ("x" * ((1 << 20) + 1), "line 1: longer than 1048576 bytes"),
    ],
)
def test_a_file_that_begins_wrongly_is_refused(tmp_path: Path, text: str, why: str) -> None:
    """Before anything is read of it."""
    path = written(tmp_path, "some.file", text)
    assert error_of(path).startswith(f"{path}: {why}")


def test_text_in_another_encoding_and_no_file_at_all(tmp_path: Path) -> None:
    """Are errors like any other."""
    path = tmp_path / "latin.csv"
    path.write_bytes(b"\xe9\n")
    assert error_of(path) == f"{path}: line 1: not UTF-8"
    missing = tmp_path / "missing"
    assert error_of(missing).startswith(f"{missing}: No such file")


def test_block_size_is_bounded(tmp_path: Path) -> None:
    """A prefix id stands for at least a token."""
    text = OWN.replace('"prefix_block_tokens": 16', '"prefix_block_tokens": 0')
    with pytest.raises(ArrivalError, match="prefix_block_tokens: 0"):
        arrivals.open_source(written(tmp_path, "own.jsonl", text))


def fixed(*ats: float) -> Source:
    """Arrivals at these times."""
    made = [Arrival(at, 10, 1) for at in ats]
    return Source(name="fixed", prefix_block_tokens=16, passes=lambda: iter(made))


def test_rescaling_changes_times_and_nothing_else() -> None:
    """Twice the rate is half the time; the source itself stays as it was."""
    source = fixed(1.0, 2.0, 5.0)
    fast = arrivals.faster(source, 2.0)
    assert [of.at for of in fast] == [0.5, 1.0, 2.5]
    assert [of.at for of in source] == [1.0, 2.0, 5.0]
    assert {(of.num_prompt_tokens, of.num_output_tokens) for of in fast} == {(10, 1)}
    assert arrivals.mean_rate_per_s(fast) == 2 * arrivals.mean_rate_per_s(source) == 1.0


def test_a_limit_takes_the_first() -> None:
    """Of a longer source, and all of a shorter one."""
    assert [of.at for of in arrivals.first(fixed(1.0, 2.0, 5.0), 2)] == [1.0, 2.0]
    assert [of.at for of in arrivals.first(fixed(1.0), 2)] == [1.0]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_and_limits_have_bounds(factor: float) -> None:
    """No rate of 0, no limit of 0."""
    with pytest.raises(ArrivalError):
        arrivals.faster(fixed(1.0), factor)
    with pytest.raises(ArrivalError):
        arrivals.first(fixed(1.0), 0)


def test_the_rate_of_hardly_anything_is_nothing() -> None:
    """One request, or several at once."""
    assert arrivals.mean_rate_per_s(fixed(1.0)) == 0.0
    assert arrivals.mean_rate_per_s(fixed(1.0, 1.0)) == 0.0
