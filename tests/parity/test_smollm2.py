"""The real model in fp32: prompts of 1 to 400 tokens, at length to 2,000, 64 new tokens each.

They run together, in chunks, with shared prefixes, on blocks that do not hold all of them at once.
One forward of transformers over prompt and output then checks tokens and logits of all positions.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers

from tests.kernels.native import needs_native
from tests.model_cache import real_model_dir
from tests.parity.comparing import compare, recorded_logits, runner_of
from tests.parity.fake_scheduler import FakeScheduler, Request
from tests.threads import NUM_THREADS

NEW_TOKENS = 64
LONG_LENS = (520, 700, 1000, 1400, 2000)
MIDDLE_LENS = (129, 150, 180, 200, 256, 257, 300, 400)
SHORT_LENS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 64, 65, 80, 96, 100, 127, 128)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


PIECES = (
    "The lighthouse keeper wrote the same three words in the log every evening: nothing to report.",
    "def median(values):\n    ordered = sorted(values)\n    return ordered[len(ordered) // 2]\n",
    "In 1869 the periodic table had 63 elements; gallium, scandium and germanium were gaps in it.",
    "La pluie tombait depuis l'aube, et personne ne parlait dans la salle d'attente.",
    '{"id": 7041, "tags": ["ferry", "night"], "price": 12.5, "valid": true}',
    "Ingredients: 200 g flour, 2 eggs, a pinch of salt, 300 ml milk. Whisk, rest, fry in butter.",
    "Q: Why does ice float?\nA: Because water expands when it freezes, so ice is less dense.\n",
    "SELECT name, count(*) FROM visits GROUP BY name HAVING count(*) > 3 ORDER BY 2 DESC;",
    "Dear Ms Okafor, thank you for your letter of 4 May about the broken gate at plot 17.",
    "3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7",
    "Tide tables are computed from harmonic constituents, of which M2 is usually the largest.",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002",
    "She turned the key twice, listened, and only then opened the drawer with the maps.",
)


def prompts(folder: Path, lens: Sequence[int]) -> list[tuple[int, ...]]:
    """Texts of PIECES in an order of their own each, cut to length; one begins as another."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(11)
    cut = []
    for length in lens:
        tokens: list[int] = []
        while len(tokens) < length:
            order = torch.randperm(len(PIECES), generator=generator).tolist()
            tokens += tokenizer("\n".join(PIECES[at] for at in order))["input_ids"]
        cut.append(tuple(tokens[:length]))
    num_shared = len(cut[-4]) * 6 // 7
    cut[-4] = cut[-2][:num_shared] + cut[-4][num_shared:]
    return cut


def hold_to_transformers(
    chosen: list[tuple[int, ...]], num_blocks: int, record_property: Callable[[str, object], None]
) -> None:
    folder = real_model_dir()
    torch.set_num_threads(NUM_THREADS)
    requests = [
        Request(number, prompt, NEW_TOKENS) for number, prompt in enumerate(reversed(chosen))
    ]
    runner = runner_of(
        folder,
        block_size=16,
        num_gpu_blocks_override=num_blocks,
        max_model_len=max(map(len, chosen)) + NEW_TOKENS,
        num_threads=NUM_THREADS,
    )
    scheduler = FakeScheduler([runner], chunk=256, budget=256, max_rows=16, share_prefixes=True)
    with recorded_logits() as recording:
        scheduler.run(requests)
    assert scheduler.num_chunks > 0
    assert scheduler.num_mixed_steps > 0
    assert scheduler.num_cached_tokens > 0
    assert scheduler.num_preemptions > 0
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    parity = compare(reference, requests, recording)
    record_property("parity", str(parity))
    assert parity.num_tokens == len(chosen) * NEW_TOKENS
    assert parity.num_near_ties <= len(chosen) // 6


def test_prompts_up_to_400_tokens(record_property: Callable[[str, object], None]) -> None:
    lens = (*SHORT_LENS, *MIDDLE_LENS)
    hold_to_transformers(prompts(real_model_dir(), lens), 130, record_property)


@pytest.mark.soak
def test_thirty_prompts(record_property: Callable[[str, object], None]) -> None:
    """Those and five of up to 2,000 tokens, which are most of the work."""
    lens = (*SHORT_LENS, *MIDDLE_LENS, *LONG_LENS)
    assert len(lens) == 30
    hold_to_transformers(prompts(real_model_dir(), lens), 260, record_property)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(dtype: str) -> None:
    """QUIRE_DETERMINISTIC=1: alone, and then in chunks among others, greedy and sampled."""
    folder = real_model_dir()
    torch.set_num_threads(NUM_THREADS)
    runner = runner_of(
        folder,
        dtype=dtype,
        deterministic=True,
        block_size=16,
        num_gpu_blocks_override=260,
        num_threads=NUM_THREADS,
    )
    chosen = prompts(folder, (*SHORT_LENS, *MIDDLE_LENS))[:21:3]
    recordings, outputs = [], []
    for options in ({"max_rows": 1}, {"max_rows": 12, "chunk": 50, "share_prefixes": True}):
        requests = [Request(number, prompt, 6) for number, prompt in enumerate(chosen)]
        for request in requests[::2]:
            request.temperature = 0.8
        scheduler = FakeScheduler([runner], **options)  # type: ignore[arg-type]
        with recorded_logits() as recording:
            scheduler.run(requests)
        recordings.append(recording)
        outputs.append([request.output for request in requests])
    assert scheduler.num_mixed_steps > 0
    assert len(recordings[0]) == 7 * 6
    assert all(torch.equal(recordings[1][key], logits) for key, logits in recordings[0].items())
    assert outputs[0] == outputs[1]
