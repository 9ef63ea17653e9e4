"""Settings: read once, strict, named in every complaint."""

import math
from typing import Any

import pytest

from servicekit import settings
from servicekit.catalogue import ALL, CATALOGUE, LOCAL
from servicekit.settings import Setting, SettingsError, boolean, choice, integer, load, number, text

SERVICES = ALL.split()


def setting(name: str, parse: Any, default: Any, services: str = "mine") -> Setting:
    """A setting with nothing special about it."""
    return Setting(
        name=name,
        parse=parse,
        default=default,
        unit="s",
        help="a help",
        services=frozenset({services}),
    )


TABLE = (
    setting("alpha", integer(1, 10), 3),
    setting("beta", choice("auto", "bfloat16", aliases={"bf16": "bfloat16"}), "auto"),
    setting("gamma", boolean, False),
    setting("delta", number(0, 1), 0.5, "other"),
)


def test_defaults_hold_where_nothing_is_set() -> None:
    """Only the service's own settings are in the result."""
    assert load("mine", TABLE, [], {}) == {"alpha": 3, "beta": "auto", "gamma": False}


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    """A flag is written with dashes."""
    environ = {"QUIRE_ALPHA": "5", "QUIRE_BETA": "bf16", "QUIRE_GAMMA": "on"}
    values = load("mine", TABLE, ["--alpha", "7"], environ)
    assert values == {"alpha": 7, "beta": "bfloat16", "gamma": True}


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    """Deployment files often hold empty values."""
    assert load("mine", TABLE, [], {"QUIRE_ALPHA": ""})["alpha"] == 3


@pytest.mark.parametrize("raw", ["0", "11", "x", "1.5", "1e3", "0x2", " "])
def test_a_malformed_value_is_named(raw: str) -> None:
    """With the name and the value."""
    with pytest.raises(SettingsError, match="QUIRE_ALPHA"):
        load("mine", TABLE, [], {"QUIRE_ALPHA": raw})


def test_an_unknown_variable_is_named() -> None:
    """A typing error must not be read as the default."""
    with pytest.raises(SettingsError, match="QUIRE_ALPHAA: no Quire service knows"):
        load("mine", TABLE, [], {"QUIRE_ALPHAA": "5"})


def test_a_variable_of_another_service_is_passed_over() -> None:
    """Even one that this service could not read: one set of variables serves all."""
    assert "delta" not in load("mine", TABLE, [], {"QUIRE_DELTA": "nonsense", "OTHER": "x"})


def test_a_flag_of_another_service_is_refused() -> None:
    """Flags are for this process alone; abbreviations are not accepted either."""
    for flags in (["--delta", "0.1"], ["--alph", "2"]):
        with pytest.raises(SystemExit) as end:
            load("mine", TABLE, flags, {})
        assert end.value.code == 2


def test_long_values_are_shown_short() -> None:
    """A secret or a file pasted by mistake does not fill the log."""
    with pytest.raises(SettingsError) as error:
        load("mine", TABLE, [], {"QUIRE_ALPHA": "9" * 1000})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("raw", ["nan", "inf", "-inf", "1.0001", "-0.1", "", "one"])
def test_numbers_are_finite_and_in_range(raw: str) -> None:
    """Both ends belong to the range."""
    assert number(0, 1)("0") == 0
    assert number(0, 1)("1") == 1
    with pytest.raises(ValueError):
        number(0, 1)(raw)


@pytest.mark.parametrize("raw", ["1", "true", "YES", " on "])
def test_words_for_true(raw: str) -> None:
    """And their opposites."""
    assert boolean(raw) is True
    assert boolean({"1": "0", "true": "false", "YES": "NO", " on ": "off"}[raw]) is False


def test_other_words_are_not_booleans() -> None:
    """`2` is not true."""
    with pytest.raises(ValueError):
        boolean("2")


def test_text_is_trimmed() -> None:
    """Around, not inside."""
    assert text("  a b ") == "a b"


@pytest.mark.parametrize("service", [*SERVICES, LOCAL])
def test_help_lists_every_setting_with_default_and_unit(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` of the real catalogue."""
    with pytest.raises(SystemExit) as end:
        load(service, CATALOGUE, ["--help"], {})
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for entry in CATALOGUE:
        described = f"(default: {entry.default}" + (f", {entry.unit})" if entry.unit else ")")
        entry_shown = f"[QUIRE_{entry.name.upper()}]" in shown.replace("[ ", "[")
        assert entry_shown is (service in entry.services), entry.name
        if service in entry.services:
            assert f"--{entry.name.replace('_', '-')} V" in shown
            assert " ".join(described.split()) in shown, entry.name


def test_the_catalogue_is_consistent() -> None:
    """One name once; every default would be accepted; every entry has a reader."""
    names = [entry.name for entry in CATALOGUE]
    assert len(names) == len(set(names))
    for entry in CATALOGUE:
        assert entry.services <= {*SERVICES, LOCAL}
        assert entry.services
        assert entry.help
        if isinstance(entry.default, str) and not entry.default:
            continue
        assert entry.parse(str(entry.default)) == entry.default, entry.name
        assert not isinstance(entry.default, float) or math.isfinite(entry.default)


def test_names_of_the_architecture_are_known() -> None:
    """Users of vLLM find the names they know."""
    names = {entry.name for entry in CATALOGUE}
    assert names >= {
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "swap_space_gib",
        "gpu_memory_utilization", "preemption_mode", "enable_prefix_caching", "scheduling_policy",
        "kv_cache_dtype", "tensor_parallel_size", "served_model_name", "dtype", "kv_cache_gib",
        "num_gpu_blocks_override", "attention_backend", "num_threads", "max_inflight_steps",
        "port", "grpc_port", "model", "host", "redis_url", "ops_port", "drain_s",
    }  # fmt: skip
    assert settings.PREFIX == "QUIRE_"


def test_aliases_of_dtype() -> None:
    """bf16 and fp32 are what people write."""
    for raw, value in (("bf16", "bfloat16"), ("FP32", "float32"), ("auto", "auto")):
        assert load("gpu_worker", CATALOGUE, [], {"QUIRE_DTYPE": raw})["dtype"] == value
