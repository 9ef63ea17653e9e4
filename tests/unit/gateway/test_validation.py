"""The one validator: limits with their numbers, defaults, parameters that are not built."""

from typing import Any

import pytest

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.prompt import Message
from gateway.core.types import ModelInfo
from gateway.core.validation import NOT_BUILT, RawRequest, check, fit

MODEL = ModelInfo(
    name="m", digest="d", vocab_size=100, max_model_len=50, eos_token_ids=(7, 8), default_top_k=20
)
CHAT = (Message(role="user", content="hi"),)


def checked(**fields: Any) -> Any:
    """A completion with fields."""
    return check(RawRequest(**{"text": "hi", **fields}), MODEL)


def refusal(**fields: Any) -> RequestRejected:
    """The refusal of a completion with fields."""
    with pytest.raises(RequestRejected) as caught:
        checked(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("max_tokens", 10**400),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("priority", 2**31),
        ("stop", [""]),
        ("stop", ["x" * 1025]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 129),
    ],
)
def test_limits_name_their_field(param: str, value: object) -> None:
    """Every one is a 400 with `param`."""
    error = refusal(**{param: value})
    assert (error.param, error.reason) == (param, RejectReason.INVALID)
    assert param in error.message


@pytest.mark.parametrize("ids", [[-1], [100], [2**31], [2**70]])
def test_token_ids_are_of_the_vocabulary(ids: list[int]) -> None:
    """Nothing else may index a table."""
    assert refusal(text=None, token_ids=ids).param == "prompt"


def test_more_min_tokens_than_max_tokens() -> None:
    """Also against the default of completions."""
    assert "5 is more than max_tokens, 4" in refusal(min_tokens=5, max_tokens=4).message
    assert refusal(min_tokens=17).param == "min_tokens"
    assert checked(text=None, messages=CHAT, min_tokens=17).min_tokens == 17


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
@pytest.mark.parametrize("value", [2, "x", True, [1], {"a": 1}, -1, 10**9, 1e308])
def test_parameters_not_built_are_refused_by_name(name: str, value: object) -> None:
    """With a word that says so."""
    error = refusal(extras={name: value})
    assert (error.param, error.reason) == (name, RejectReason.UNSUPPORTED)
    assert error.message == f"{name} is not supported yet."


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in NOT_BUILT.items() for v in (None, *values)]
)
def test_their_neutral_values_pass(name: str, value: object) -> None:
    """SDKs send them."""
    assert checked(extras={name: value})


def test_an_unknown_model() -> None:
    """404 to REST, NOT_FOUND to gRPC."""
    assert refusal(model="other").reason is RejectReason.MODEL_NOT_FOUND
    assert checked(model="m")


def test_roles() -> None:
    """developer is system's newer name."""
    error = refusal(text=None, messages=[Message(role="robot", content="x")])
    assert error.param == "messages[0].role"
    found = checked(text=None, messages=[Message(role="developer", content="x")])
    assert found.messages == (Message(role="system", content="x"),)
    assert refusal(text=None, messages=[]).param == "messages"


def test_exactly_one_prompt() -> None:
    """None and two are as bad."""
    assert refusal(text=None).param == "prompt"
    assert refusal(token_ids=[1]).param == "prompt"


def test_defaults_are_the_models() -> None:
    """What generation_config says, and 16 tokens for a completion."""
    found = checked()
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (1.0, 1.0, 20, 16)
    assert checked(top_k=-1).top_k == 0
    assert checked(top_k=10**9).top_k == 100


def test_stop_tokens_are_the_users_and_the_models() -> None:
    """Unless the client ignores the end."""
    assert checked(stop_token_ids=[9, 7]).stop_token_ids == (9, 7, 8)
    assert checked(stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


def test_max_tokens_are_clamped_to_the_context() -> None:
    """A chat without max_tokens may fill it."""
    assert fit(checked(max_tokens=10**9), 20, 50, random_seed=1).max_tokens == 30
    assert fit(checked(text=None, messages=CHAT), 20, 50, random_seed=1).max_tokens == 30
    assert fit(checked(max_tokens=40, min_tokens=35), 20, 50, random_seed=1).min_tokens == 30
    assert fit(checked(), 49, 50, random_seed=1).max_tokens == 1


@pytest.mark.parametrize("length", [50, 51, 10**6])
def test_a_prompt_over_the_context_names_both_numbers(length: int) -> None:
    """There must be room for one token."""
    with pytest.raises(RequestRejected, match=rf"{length} tokens .* 50 tokens") as caught:
        fit(checked(), length, 50, random_seed=1)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestRejected) as caught:
        fit(checked(text=None, messages=CHAT), length, 50, random_seed=1)
    assert caught.value.param == "messages"


def test_an_empty_prompt() -> None:
    """Nothing to compute."""
    with pytest.raises(RequestRejected, match="at least one token"):
        fit(checked(text=""), 0, 50, random_seed=1)


def test_seeds_are_64_bits() -> None:
    """A negative seed is a seed too; none is a random one."""
    assert fit(checked(seed=-1), 1, 50, random_seed=1).seed == 2**64 - 1
    assert fit(checked(), 1, 50, random_seed=5).seed == 5


def test_numbers_fit_the_wire() -> None:
    """The smallest top_p is not 0 in 32 bits."""
    assert checked(top_p=1e-300).top_p == 1e-6
