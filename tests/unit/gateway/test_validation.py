"""The one validator: limits with their numbers, defaults, parameters that are not built."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.prompt import Message
from gateway.core.requests import RawRequest
from gateway.core.types import ModelInfo
from gateway.core.validation import NOT_BUILT, check, check_all, check_best_of, fit

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
        ("stop", ["x"] * 10_000),
        ("stop", ["a\ud800"]),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("-inf")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101.0),
        ("repetition_penalty", float("nan")),
        ("deadline_ms", 0),
        ("deadline_ms", 2**63),
        ("user", "x" * 257),
        ("user", "a\0b"),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", "x" * 2**20),
        ("cache_salt", "a\0b"),
        ("cache_salt", "\udc00"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"+1": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"100": 1}),
        ("logit_bias", {"9" * 400: 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {100: 1}),
        ("logit_bias", {2**31: 1}),
        ("logit_bias", {"1": 100.5}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
    ],
)
def test_limits_name_their_field(param: str, value: object) -> None:
    """Every one is a 400 with `param`."""
    error = refusal(**{param: value})
    assert (error.param, error.reason) == (param, RejectReason.INVALID)
    assert param in error.message


@pytest.mark.parametrize("number", [-1, 21, 2**63])
def test_logprobs_are_up_to_20(number: int) -> None:
    """The error has the name that the client's interface uses."""
    assert refusal(num_logprobs=number).param == "logprobs"
    assert "from 0 to 20" in refusal(num_logprobs=number, num_logprobs_name="top_logprobs").message
    assert checked(num_logprobs=20).num_logprobs == 20


def test_limits_are_in_the_messages() -> None:
    """Whoever meets one can read it."""
    assert "at most 16 strings, not 17" in refusal(stop=["x"] * 17).message
    assert "from 0 to 99" in refusal(logit_bias={"100": 1}).message
    assert "from -100 to 100" in refusal(logit_bias={"1": 101}).message
    assert "at most 1024 tokens" in refusal(logit_bias={str(i): 0 for i in range(1025)}).message
    assert "from -2.0 to 2.0" in refusal(presence_penalty=3).message
    assert "1 to 256 characters" in refusal(cache_salt="").message


def test_biases_are_ordered_by_token() -> None:
    """Whatever order and whatever kind of key the client's interface has."""
    assert checked(logit_bias={"9": 1, "10": -2.5}).logit_bias == ((9, 1.0), (10, -2.5))
    assert checked(logit_bias={10: -2.5, 9: 1}).logit_bias == ((9, 1.0), (10, -2.5))
    assert checked(logit_bias={}).logit_bias == ()


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
    assert found.prompt.messages == (Message(role="system", content="x"),)
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


def test_defaults_of_generation_config() -> None:
    """Of those parameters that it may set."""
    model = replace(MODEL, default_min_p=0.1, default_repetition_penalty=1.2)
    found = check(RawRequest(text="hi"), model)
    assert (found.min_p, found.repetition_penalty) == (0.1, 1.2)
    found = check(RawRequest(text="hi", min_p=0.0, repetition_penalty=1.0), model)
    assert (found.min_p, found.repetition_penalty) == (0.0, 1.0)


def test_stop_tokens_are_the_users_and_the_models() -> None:
    """Unless the client ignores the end."""
    assert checked(stop_token_ids=[9, 7]).stop_token_ids == (9, 7, 8)
    assert checked(stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


def test_max_tokens_are_clamped_to_the_context() -> None:
    """A chat without max_tokens may fill it."""
    assert fit(checked(max_tokens=50), 20, 50, random_seed=1).max_tokens == 30
    assert fit(checked(text=None, messages=CHAT), 20, 50, random_seed=1).max_tokens == 30
    assert fit(checked(max_tokens=40, min_tokens=35), 20, 50, random_seed=1).min_tokens == 30
    assert fit(checked(), 49, 50, random_seed=1).max_tokens == 1


@pytest.mark.parametrize("number", [51, 10**9, 2**63, 10**400])
def test_more_than_the_context_can_never_be_meant(number: int) -> None:
    """Both numbers are named, unless the one would fill the message."""
    error = refusal(max_tokens=number)
    assert "more than the context of 50 tokens" in error.message
    assert (str(number) in error.message) == (number < 2**63)
    assert len(error.message) < 200
    assert refusal(max_tokens=51, max_tokens_name="max_completion_tokens").param == (
        "max_completion_tokens"
    )


@pytest.mark.parametrize("length", [50, 51, 10**6])
def test_a_prompt_over_the_context_names_both_numbers(length: int) -> None:
    """There must be room for one token."""
    with pytest.raises(RequestRejected, match=rf"{length} tokens .* 50 tokens") as caught:
        fit(checked(), length, 50, random_seed=1)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestRejected) as caught:
        fit(checked(text=None, messages=CHAT), length, 50, random_seed=1)
    assert caught.value.param == "messages"


def test_a_text_that_can_never_fit_is_not_tokenized() -> None:
    """No token has more than 128 characters."""
    assert checked(text="x" * 50 * 128)
    error = refusal(text="x" * (50 * 128 + 1), prompt_name="prompt[3]")
    assert (error.param, "6401 characters" in error.message) == ("prompt[3]", True)
    many = [Message(role="user", content="x" * 3000)] * 3
    assert refusal(text=None, messages=many).param == "messages"


def test_half_a_character_is_no_text() -> None:
    """NUL is a character."""
    assert refusal(text="a\ud83d").param == "prompt"
    half = [Message(role="user", content="\udc00")]
    assert refusal(text=None, messages=half).param == "messages[0].content"
    assert checked(text="a\0b", stop=["\0"]).stops == ("\0",)


def test_scoring() -> None:
    """Echo with logprobs asks for the prompt's; without, or without echo, nothing is computed."""
    scored = fit(checked(echo=True, num_logprobs=1, max_tokens=1), 9, 50, random_seed=1)
    assert (scored.prompt_logprobs, scored.num_logprobs) == (True, 1)
    assert not fit(checked(num_logprobs=1), 9, 50, random_seed=1).prompt_logprobs
    assert not fit(checked(echo=True), 9, 50, random_seed=1).prompt_logprobs


def test_a_prompt_alone() -> None:
    """max_tokens 0 needs echo; a token is computed for it, and not shown."""
    assert refusal(max_tokens=0).message == "max_tokens: must be at least 1."
    found = checked(max_tokens=0, echo=True)
    assert (found.prompt_only, fit(found, 9, 50, random_seed=1).max_tokens) == (True, 1)
    assert refusal(max_tokens=0, min_tokens=1, echo=True).param == "min_tokens"
    assert refusal(max_tokens=-1, echo=True).param == "max_tokens"


def test_chats_are_not_echoed() -> None:
    """Said, rather than ignored."""
    error = refusal(text=None, messages=CHAT, echo=True)
    assert (error.param, error.reason) == ("echo", RejectReason.UNSUPPORTED)


def test_the_number_of_prompt_logprobs_has_a_bound() -> None:
    """A long prompt with many logprobs each would be an answer of many megabytes."""
    found = checked(echo=True, num_logprobs=20)
    assert fit(found, 49_000, 10**6, random_seed=1)
    with pytest.raises(RequestRejected, match=r"1050000 values, more than 1048576") as caught:
        fit(found, 50_000, 10**6, random_seed=1)
    assert caught.value.param == "logprobs"
    with pytest.raises(RequestRejected, match=r"1050000 values, more than 1048576"):
        fit(checked(echo=True, num_logprobs=20, n=2), 25_000, 10**6, random_seed=1)


def test_the_last_message_is_continued_or_answered() -> None:
    """Not both, and there must be something to continue."""
    both = refusal(text=None, messages=CHAT, continue_final_message=True)
    assert both.param == "continue_final_message"
    assert "add_generation_prompt" in both.message
    fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    found = checked(text=None, messages=CHAT, **fields)
    assert found.prompt.continue_final_message
    blank = [Message(role="assistant", content=" ")]
    assert refusal(text=None, messages=blank, **fields).param == "continue_final_message"


def test_several_prompts() -> None:
    """All are checked; their number and what they may be answered with have bounds."""
    raws = [RawRequest(text="hi", prompt_name=f"prompt[{i}]") for i in range(128)]
    assert len(check_all(raws, MODEL)) == 128
    with pytest.raises(RequestRejected, match="at most 128 prompts, not 129"):
        check_all([*raws, raws[0]], MODEL)
    with pytest.raises(RequestRejected) as caught:
        check_all([raws[0], RawRequest(token_ids=[100], prompt_name="prompt[1]")], MODEL)
    assert caught.value.param == "prompt[1]"
    large = replace(MODEL, max_model_len=2**20)
    half = RawRequest(text="hi", max_tokens=2**19)
    assert len(check_all([half, half], large)) == 2
    with pytest.raises(RequestRejected, match=r"1572864 tokens, more than 1048576") as caught:
        check_all([half, half, half], large)
    assert caught.value.param == "max_tokens"


def test_several_samples() -> None:
    """Counted with the prompts, in answers and in what they may be answered with."""
    assert checked(n=128).n == 128
    assert checked().n == checked(n=None).n == 1
    for n in (0, -1, 129, 10**9):
        assert refusal(n=n).message == "n: must be from 1 to 128."
    raws = [RawRequest(text="hi", n=32) for _ in range(5)]
    assert len(check_all(raws[:4], MODEL)) == 4
    with pytest.raises(RequestRejected) as caught:
        check_all(raws, MODEL)
    assert caught.value.param == "n"
    assert caught.value.message == "n: 32 samples of 5 prompts are 160 answers, more than 128."
    large = replace(MODEL, max_model_len=2**20)
    assert check_all([RawRequest(text="hi", max_tokens=2**19, n=2)], large)
    with pytest.raises(RequestRejected, match=r"3 answers .* 1572864 tokens, more than") as caught:
        check_all([RawRequest(text="hi", max_tokens=2**19, n=3)], large)
    assert caught.value.param == "max_tokens"


def test_several_answers_without_a_length_share_what_is_allowed() -> None:
    """A long context is no reason to refuse them."""
    large = replace(MODEL, max_model_len=2**18)
    chat: dict[str, Any] = {"messages": CHAT}
    for n, share in ((1, None), (2, 2**18), (4, 2**18), (5, 2**20 // 5), (128, 8192)):
        assert [c.max_tokens for c in check_all([RawRequest(**chat, n=n)], large)] == [share]
    assert check_all([RawRequest(**chat, n=128, min_tokens=8192)], large)
    with pytest.raises(RequestRejected, match="8193 is more than each of 128") as caught:
        check_all([RawRequest(**chat, n=128, min_tokens=8193)], large)
    assert caught.value.param == "min_tokens"


def test_best_of_is_n() -> None:
    """Nothing is chosen among more."""
    for good in ((None, None), (1, None), (None, 3), (3, 3)):
        check_best_of(*good)
    for bad in ((2, None), (2, 1), (1, 2), (0, None)):
        with pytest.raises(RequestRejected, match=r"best_of: .*not supported yet") as caught:
            check_best_of(*bad)
        assert caught.value.param == "best_of"


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
