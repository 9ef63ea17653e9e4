"""QUIRE_QUANTIZATION: the lean forward over weights of 8 and 4 bits, held against transformers.

The modules are transformers' own. Once their linear weights are what the levels stand for, and the
forward is the same function; once they are the model's, and it is as near as rounding lets it be.
"""

import json
from typing import Any

import pytest
import structlog
import torch
import torch.nn.functional as F

from benchmarks import perplexity
from benchmarks import quantization as benchmark
from gpu_worker import attention, models
from gpu_worker.attention import PagedContext, UnsupportedModelError, make_backend
from gpu_worker.kv_cache import allocate, layout
from kernels.quantization import BITS, GROUP, quantize
from tests.kernels.native import needs_native
from tests.model_cache import real_model_dir
from tests.parity import families
from tests.parity.comparing import recorded_logits, runner_of
from tests.parity.fake_scheduler import FakeScheduler, Request
from tests.threads import NUM_THREADS

pytestmark = [needs_native, pytest.mark.slow, pytest.mark.timeout(240)]

CPU = torch.device("cpu")
LOG = structlog.get_logger()
LEAN = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3")
TOKENS, BLOCK_SIZE = 40, 8

# Of logits, the largest difference over their spread: rounding of sums, and of bf16.
SAME_FUNCTION = {torch.float32: 5e-5, torch.bfloat16: 2e-1}
# Least mean cosine of logits and those of weights as they are: of 8 bits, for random weights.
NEAR = 0.999
# Of one layer's outputs, over their size: 8 bits a column; 4 bits, for weights that had 4 before.
OF_A_LAYER = {"int8": 0.02, "int4": 0.03}
LESS_THAN = {"int8": 0.01, "int4": 0.01}  # of perplexity on the fixed text


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model with random weights."""
    import transformers

    attention.register()
    torch.manual_seed(1)
    module = transformers.AutoModelForCausalLM.from_config(
        families.config(family), dtype=dtype, attn_implementation=attention.IMPLEMENTATION
    )
    return module.eval().requires_grad_(False)


def fuse(module: Any, quantization: str, **changes: Any) -> models.LoadedModel:
    """On native kernels, unless `changes` say otherwise."""
    wanted = {"wanted": True, "deterministic": False, **changes}
    plain = models.wrap(module, CPU)
    fused = models.fuse(plain, "native", quantization=quantization, log=LOG, **wanted)
    models.fix_rotary(fused, 128)
    return fused


def round_weights(module: Any, quantization: str) -> None:
    """Gives the modules what the levels of each linear layer stand for."""
    for name, part in module.named_modules():
        if type(part) is torch.nn.Linear:
            whole = name != "lm_head" and part.in_features % GROUP == 0
            bits = BITS[quantization] if whole else 8
            part.weight.data = quantize(part.weight, bits).dequantized().to(part.weight.dtype)


def context_of(model: models.LoadedModel) -> PagedContext:
    """A fresh cache for TOKENS tokens."""
    cache = allocate(layout(model.kv_shape, BLOCK_SIZE, 8), model.dtype, CPU)
    return PagedContext(cache, make_backend("native", CPU))


@torch.inference_mode()
def logits_of(model: models.LoadedModel) -> torch.Tensor:
    """Of all of TOKENS tokens, one prompt."""
    table = torch.arange(8, dtype=torch.int32)
    tokens = (torch.arange(TOKENS) * 7919 + 11) % model.vocab_size
    every = torch.arange(TOKENS)
    step = models.one_row(0, TOKENS, table, BLOCK_SIZE)
    return models.forward(model, context_of(model), step, tokens, every, every).float()


@pytest.mark.parametrize("dtype", SAME_FUNCTION, ids=str)
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("family", LEAN)
def test_the_forward_is_that_of_modules_with_rounded_weights(
    family: str, quantization: str, dtype: torch.dtype
) -> None:
    module = build(family, dtype)
    fused = fuse(module, quantization)
    assert fused.fused is not None
    assert [linear.kind for linear in fused.fused.linears] == [*[quantization] * 8, "int8"]
    original = logits_of(models.wrap(module, CPU))
    round_weights(module, quantization)
    want, got = logits_of(models.wrap(module, CPU)), logits_of(fused)
    assert float((got - want).abs().max()) <= SAME_FUNCTION[dtype] * float(want.std())
    assert float((original - want).abs().max()) > 2e-3 * float(want.std())  # rounding shows


@pytest.mark.parametrize("family", LEAN)
def test_logits_are_near_those_of_the_models_own_weights(family: str) -> None:
    module = build(family)
    want, got = logits_of(models.wrap(module, CPU)), logits_of(fuse(module, "int8"))
    assert float(torch.cosine_similarity(got, want, dim=-1).mean()) >= NEAR


@pytest.mark.parametrize("quantization", BITS)
def test_a_fault_in_a_packed_weight_is_refused_at_load(quantization: str) -> None:
    """Rounding is none, however much it costs: the modules get the same weights."""
    module = build("llama")
    fused = fuse(module, quantization)
    assert models.check_parity(fused, context_of(fused), BLOCK_SIZE) > 0.9999
    module.model.layers[1].mlp.down_proj.weight.data *= -1
    with pytest.raises(UnsupportedModelError, match="llama: its paged logits are not those of"):
        models.check_parity(fused, context_of(fused), BLOCK_SIZE)


def test_inputs_without_whole_groups_take_8_bits() -> None:
    module = build("llama")
    for layer in module.model.layers:
        layer.mlp.down_proj = torch.nn.Linear(128 - 16, 64, bias=False)
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            part.weight.data = part.weight.data[: 128 - 16].clone()
    fused = fuse(module.requires_grad_(False), "int4")
    assert fused.fused is not None
    kinds = ["int4", "int4", "int4", "int8"]
    assert [linear.kind for linear in fused.fused.linears] == [*kinds, *kinds, "int8"]


@pytest.mark.parametrize(
    ("family", "backend", "changes", "reason"),
    [
        ("llama", "torch", {}, "the torch back end computes attention"),
        ("llama", "triton", {}, "the triton back end computes attention"),
        ("llama", "native", {"wanted": False}, "QUIRE_FUSED=0"),
        ("mixtral", "native", {}, "its layers are MixtralDecoderLayer"),
    ],
)
def test_what_can_not_be_had_in_8_bits_is_refused(
    family: str, backend: str, changes: dict[str, Any], reason: str
) -> None:
    model = models.wrap(build(family), CPU)
    wanted = {"wanted": True, "deterministic": False, **changes}
    asked = "QUIRE_QUANTIZATION=int8"
    with pytest.raises(UnsupportedModelError, match=f"can't serve {family} with {asked}: {reason}"):
        models.fuse(model, backend, quantization="int8", log=LOG, **wanted)
    wanted["deterministic"] = True
    with pytest.raises(UnsupportedModelError, match=f"QUIRE_DETERMINISTIC=1 and {asked}: {reason}"):
        models.fuse(model, backend, quantization="int8", log=LOG, **wanted)


def make_requests(vocabulary: int, count: int = 20) -> list[Request]:
    """Prompts of 1 to 100 tokens; every other is sampled."""
    generator = torch.Generator().manual_seed(5)
    requests = []
    for number in range(count):
        prompt = torch.randint(0, vocabulary, (1 + (number * 37) % 100,), generator=generator)
        request = Request(number, tuple(prompt.tolist()), 8)
        request.temperature = 0.0 if number % 2 else 0.9
        requests.append(request)
    return requests


def bits_are_their_own(runner: Any, requests: int) -> None:
    """Of all logits: alone, in large batches, and in chunks among others."""
    recordings, outputs = [], []
    for options in (
        {"max_rows": 1},
        {"max_rows": 64, "budget": 256, "admit_all": True},
        {"max_rows": 7, "chunk": 5, "budget": 96},
        {"max_rows": 16, "share_prefixes": True},
    ):
        batch = make_requests(runner.info.vocab_size, requests)
        scheduler = FakeScheduler([runner], **options)  # type: ignore[arg-type]
        with recorded_logits() as recording:
            scheduler.run(batch)
        recordings.append(recording)
        outputs.append([request.output for request in batch])
        assert options == {"max_rows": 1} or scheduler.num_mixed_steps > 0
        assert "admit_all" not in options or scheduler.most_rows == requests
    assert len(recordings[0]) == requests * 8
    for recording, output in zip(recordings[1:], outputs[1:], strict=True):
        differing = [k for k in recording if not torch.equal(recording[k], recordings[0][k])]
        assert differing == []
        assert output == outputs[0]
    assert len({tuple(output) for output in outputs[0]}) > requests // 2  # requests differ


@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "bfloat16")]
)
def test_bits_do_not_depend_on_the_batch(
    family: str, dtype: str, quantization: str, tmp_path: Any
) -> None:
    runner = runner_of(
        families.save(family, tmp_path / family),
        dtype=dtype,
        quantization=quantization,
        deterministic=True,
        num_gpu_blocks_override=400,
        max_num_seqs=64,
    )
    bits_are_their_own(runner, 20)


@pytest.mark.parametrize("quantization", BITS)
def test_bits_of_the_real_model(quantization: str) -> None:
    torch.set_num_threads(NUM_THREADS)
    runner = runner_of(
        real_model_dir(),
        quantization=quantization,
        deterministic=True,
        block_size=16,
        num_gpu_blocks_override=200,
        num_threads=NUM_THREADS,
    )
    bits_are_their_own(runner, 3)


@pytest.fixture(scope="module")
def real() -> models.LoadedModel:
    """The real model in fp32, on its own modules."""
    return models.load(real_model_dir(), dtype="float32", device=CPU, log=LOG)


@pytest.mark.parametrize("quantization", BITS)
def test_every_layer_of_the_real_model_is_near_its_module(
    real: models.LoadedModel, quantization: str
) -> None:
    """Each alone, on inputs of its own: 30 layers of four, and the head."""
    fused = fuse(real.module, quantization).fused
    assert fused is not None
    originals = []
    for layer in real.module.model.layers:
        of, mlp = layer.self_attn, layer.mlp
        groups = (of.q_proj, of.k_proj, of.v_proj), (of.o_proj,), (mlp.gate_proj, mlp.up_proj)
        originals += [*groups, (mlp.down_proj,)]
    originals.append((real.module.lm_head,))
    assert len(originals) == len(fused.linears) == 30 * 4 + 1
    for place, (modules, linear) in enumerate(zip(originals, fused.linears, strict=True)):
        depth = modules[0].in_features
        x = torch.randn(3, depth, generator=torch.Generator().manual_seed(place))
        want = torch.cat([F.linear(x, part.weight) for part in modules], dim=1)
        off = float((linear(x) - want).norm() / want.norm())
        assert 1e-5 < off <= OF_A_LAYER[quantization], (place, off)


@pytest.mark.soak
def test_perplexity_stays_within_a_hundredth(
    real: models.LoadedModel, record_property: Any
) -> None:
    torch.set_num_threads(NUM_THREADS)
    tokens = perplexity.token_ids(real_model_dir())
    assert len(tokens) > 1000
    models.fix_rotary(real, 2048)
    plain = perplexity.perplexity(real, "native", tokens)
    assert 5 < plain < 40  # it is a text to the model
    for quantization in BITS:
        fused = models.fuse(
            real, "native", wanted=True, deterministic=False, quantization=quantization, log=LOG
        )
        models.fix_rotary(fused, 2048)
        found = perplexity.perplexity(fused, "native", tokens)
        record_property(quantization, f"{plain:.4f} -> {found:.4f}")
        assert abs(found / plain - 1) < LESS_THAN[quantization], (quantization, plain, found)


def test_the_benchmark_has_a_line_for_each_kind_of_weights(tmp_path: Any, capsys: Any) -> None:
    out = tmp_path / "quantization.json"
    assert benchmark.main(["--quick", "--threads", str(NUM_THREADS), "--out", str(out)]) == 0
    results = {of["quantization"]: of for of in json.loads(out.read_text())["results"]}
    assert list(results) == ["none", *BITS]
    for of in results.values():
        assert of["step_ms"]["decode 1 x 256"] > 0
        assert of["floor_ms"] > 0
    plain, of_8, of_4 = (of["weight_bytes"] for of in results.values())
    assert plain == 2 * 134_479_872  # the real model's linear weights, in bf16
    assert of_8 == pytest.approx(plain / 2, rel=0.01)
    assert of_4 == pytest.approx(plain * 0.352, rel=0.01)  # the head in 8 bits
    printed = capsys.readouterr().out
    assert [f"\n| {name} " in printed for name in results] == [True] * 3
