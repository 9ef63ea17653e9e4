"""Logprobs of output and prompt equal transformers' log softmax, however steps were cut and moved.

Everything but the processes between them is real: core, codecs, replica, runner. Each condition is
asserted by its counter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers

from gpu_worker import scoring
from tests.model_cache import real_model_dir
from tests.parity import families
from tests.parity.comparing import runner_of
from tests.parity.conftest import Small
from tests.parity.whole import Stream, Whole
from tests.threads import NUM_THREADS

WITHIN = 1e-4
NEW_TOKENS = 24
PROMPT_LENS = (1, 5, 30, 64, 100, 150)

pytestmark = pytest.mark.timeout(120)

Wants = dict[str, Any]
OUTPUT: Wants = {"num_logprobs": 3}
PROMPT: Wants = {"num_logprobs": 5, "prompt_logprobs": True}
NOTHING: Wants = {}
TOKENS_ONLY: Wants = {"num_logprobs": 0, "prompt_logprobs": True}
WANTS = (OUTPUT, PROMPT, NOTHING, TOKENS_ONLY, PROMPT, OUTPUT)


def add_all(whole: Whole, shared: int = 0, wants: Sequence[Wants] = WANTS) -> None:
    """Requests of PROMPT_LENS; the first `shared` tokens are the same in all that are longer."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(0, families.VOCABULARY, (200,), generator=generator).tolist()
    for number, (length, wanted) in enumerate(zip(PROMPT_LENS, wants, strict=True)):
        own = torch.randint(0, families.VOCABULARY, (length,), generator=generator).tolist()
        prompt = (*common[:shared], *own[shared:]) if length > shared else tuple(own)
        heat: Wants = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 2 else {}
        whole.add(prompt, max_tokens=NEW_TOKENS, **heat, **wanted)


@torch.inference_mode()
def check(reference: Any, streams: Sequence[Stream], new_tokens: int = NEW_TOKENS) -> int:
    """Compares all that was given with one forward each; returns the number of scored tokens."""
    num_scored = 0
    for stream in streams:
        assert stream.ended
        assert len(stream.tokens) == new_tokens
        known = [*stream.prompt, *stream.tokens]
        logits = reference(torch.tensor([known]), use_cache=False).logits[0, :-1]
        expected = torch.log_softmax(logits.double(), -1)
        wants = stream.sampling
        wants_prompt = len(stream.prompt) - 1 if wants.prompt_logprobs else 0
        assert len(stream.prompt_logprobs) == wants_prompt
        assert len(stream.logprobs) == (0 if wants.num_logprobs is None else new_tokens)
        first = len(stream.prompt)
        parts = ((1, stream.prompt_logprobs), (first, stream.logprobs))
        for start, rows in parts:
            for place, (own, likely) in enumerate(rows, start):
                row = expected[place - 1]
                assert own == pytest.approx(float(row[known[place]]), abs=WITHIN)
                assert len(likely) == wants.num_logprobs
                ids, values = [i for i, _ in likely], [value for _, value in likely]
                assert values == sorted(values, reverse=True)
                assert len(set(ids)) == len(ids)
                assert values == pytest.approx(row[ids].tolist(), abs=WITHIN)
                assert values == pytest.approx(row.topk(len(ids)).values.tolist(), abs=WITHIN)
                num_scored += 1
    return num_scored


@pytest.mark.parametrize("chunk", [7, 0])
@pytest.mark.parametrize("depth", [1, 3])
def test_mixed_batches(chunk: int, depth: int, small: Callable[[str], Small]) -> None:
    model = small("llama")
    whole = Whole(model.runners[:1], chunk=chunk, max_inflight_steps=depth)
    add_all(whole)
    whole.run()
    assert whole.num_mixed_steps > 0
    assert (whole.core.stats.num_chunked_prefills > 40) == bool(chunk)
    prompts = sum(n - 1 for n, w in zip(PROMPT_LENS, WANTS, strict=True) if "prompt_logprobs" in w)
    assert check(model.reference, whole.streams) == prompts + 5 * NEW_TOKENS


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) for f in families.FAMILIES if f != "llama"],
)
def test_other_families(family: str, small: Callable[[str], Small]) -> None:
    model = small(family)
    whole = Whole(model.runners[:1], chunk=13)
    add_all(whole)
    whole.run()
    check(model.reference, whole.streams)


def test_slices_of_a_long_prompt(
    small: Callable[[str], Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head computes a few positions at a time; its result is that of all at once."""
    monkeypatch.setattr(scoring, "SLICE", 16)
    model = small("llama")
    sizes: list[int] = []
    score = scoring.score

    def counting(logits: torch.Tensor, *args: Any) -> scoring.Scores:
        sizes.append(len(logits))
        return score(logits, *args)

    monkeypatch.setattr(scoring, "score", counting)
    whole = Whole(model.runners[:1])
    add_all(whole)
    whole.run()
    assert max(sizes) == 16
    assert sizes.count(16) >= 149 // 16
    check(model.reference, whole.streams)


@pytest.mark.parametrize("wants", [WANTS, WANTS[::-1]])
def test_preemption(wants: Sequence[Wants], small: Callable[[str], Small]) -> None:
    model = small("llama")
    whole = Whole([model.cramped], chunk=32)
    add_all(whole, shared=24, wants=wants)
    whole.run()
    assert whole.core.stats.num_preemptions > 0
    check(model.reference, whole.streams)


@pytest.mark.parametrize("num_steps", [3, 14, 22])
def test_moving_to_another_runner(num_steps: int, small: Callable[[str], Small]) -> None:
    """Known output is computed again with its logprobs, and repeated under the next attempt."""
    model = small("llama")
    whole = Whole(model.runners, chunk=24)
    add_all(whole, shared=50)
    whole.run(num_steps)
    whole.lose("w0")
    whole.run()
    stats = whole.core.stats
    assert stats.num_recovered > 0
    assert any(stream.attempt == 2 for stream in whole.streams)
    assert sum(stream.num_repeats for stream in whole.streams) > 0
    check(model.reference, whole.streams)


def test_scoring_while_prefixes_are_shared(small: Callable[[str], Small]) -> None:
    """A scored prompt takes nothing from the cache; the others hit, before and after it."""
    model = small("llama")
    whole = Whole(model.runners[:1])
    for wants in (NOTHING, PROMPT, OUTPUT, TOKENS_ONLY, NOTHING):
        add_all(whole, shared=60, wants=[wants] * len(PROMPT_LENS))
        whole.run()
    by_wants = [whole.streams[i : i + 6] for i in range(0, 30, 6)]
    for streams in (by_wants[1], by_wants[3]):
        assert [stream.num_cached for stream in streams] == [0] * 6
    for streams in (by_wants[2], by_wants[4]):
        assert sum(stream.num_cached for stream in streams) >= 300
    check(model.reference, whole.streams)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_greedy_with_a_repetition_penalty_is_generate(
    penalty: float, small: Callable[[str], Small]
) -> None:
    model = small("llama")
    whole = Whole(model.runners[:1], chunk=7)
    add_all(whole, wants=[OUTPUT] * len(PROMPT_LENS))
    prompts = [stream.prompt for stream in whole.streams]
    whole = Whole(model.runners[:1], chunk=7)
    for prompt in prompts:
        whole.add(prompt, max_tokens=48, repetition_penalty=penalty, **OUTPUT)
    whole.run()
    for stream in whole.streams:
        generated = model.reference.generate(
            torch.tensor([stream.prompt]),
            max_new_tokens=48,
            do_sample=False,
            repetition_penalty=penalty,
        )
        assert stream.tokens == generated[0, len(stream.prompt) :].tolist()
    check(model.reference, whole.streams, 48)  # of the logits before the penalty


def test_penalties_survive_a_move(small: Callable[[str], Small]) -> None:
    """Their tokens are those of prompt and output, wherever the output was made."""
    model = small("llama")
    spec: Wants = {"repetition_penalty": 1.1, "frequency_penalty": 1.5, "presence_penalty": 0.7}
    outputs = []
    for loses in (False, True):
        whole = Whole(model.runners, chunk=24)
        for length in PROMPT_LENS:
            whole.add(range(length), max_tokens=NEW_TOKENS, temperature=0.7, seed=length, **spec)
        whole.run(12 if loses else 1000)
        if loses:
            whole.lose("w1")
            whole.run()
            assert whole.core.stats.num_recovered > 0
        outputs.append([stream.tokens for stream in whole.streams])
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model() -> None:
    """A few hundred tokens of prompt at once and in chunks, in fp32."""
    folder = real_model_dir()
    torch.set_num_threads(NUM_THREADS)
    runner = runner_of(
        folder,
        block_size=16,
        num_gpu_blocks_override=200,
        max_model_len=1024,
        num_threads=NUM_THREADS,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Tide tables are computed from harmonic constituents; ice floats, and rain may fall. "
    prompts = [tokenizer(text * count)["input_ids"] for count in (1, 4, 16)]
    whole = Whole([runner], chunk=100)
    for prompt in prompts:
        whole.add(prompt, max_tokens=16, num_logprobs=20, prompt_logprobs=True)
    whole.run()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    assert check(reference, whole.streams, 16) == sum(map(len, prompts)) - 3 + 48
