"""What is refused at load, by name; rotary scaling; the choice of dtype and back end."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import transformers

from gpu_worker import attention, models
from gpu_worker.attention import UnsupportedModelError

CPU = torch.device("cpu")
LOG = structlog.get_logger()

pytestmark = pytest.mark.timeout(120)  # the first import of transformers takes its time


def small(config_class: Any, **changes: Any) -> Any:
    """A configuration with a few layers."""
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    return config_class(**values)


def build(config: Any) -> Any:
    """A random model on the paged interface."""
    attention.register()
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.IMPLEMENTATION
    ).eval()


REFUSED = [
    ("MambaConfig", {}, "mamba: it keeps a recurrent state"),
    ("RwkvConfig", {}, "rwkv: it keeps a recurrent state"),
    ("JambaConfig", {}, "jamba: it keeps a recurrent state .* in some layers"),
    ("Qwen3NextConfig", {}, "qwen3_next: it keeps a recurrent state"),
    ("DeepseekV2Config", {}, "deepseek_v2: its latent attention"),
    ("DeepseekV3Config", {}, "deepseek_v3: its latent attention"),
    ("Llama4TextConfig", {}, "llama4_text: it has chunked attention"),
    ("Gemma3nTextConfig", {}, "gemma3n_text: some of its layers read other layers'"),
    ("BloomConfig", {}, "bloom: it adds a position bias"),
    ("FalconConfig", {"alibi": True}, "falcon: it adds a position bias"),
    ("BartConfig", {}, "bart: it is an encoder-decoder"),
    ("T5Config", {}, "t5: it is an encoder-decoder"),
    ("Lfm2Config", {"layer_types": ["conv"], "num_hidden_layers": 1}, "lfm2: .*of kind conv"),
    ("ViTConfig", {}, "vit: transformers has no causal language model"),
    ("FalconConfig", {}, "falcon: FalconForCausalLM does not go through"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused_by_its_configuration(name: str, changes: dict[str, Any], message: str) -> None:
    config = getattr(transformers, name)(**changes)
    with pytest.raises(UnsupportedModelError, match=f"can't serve {message}"):
        models.refuse_unsupported(config)


@pytest.mark.parametrize(
    "name",
    [
        "LlamaConfig",
        "Qwen2Config",
        "Qwen3Config",
        "Qwen3MoeConfig",
        "MistralConfig",
        "MixtralConfig",
        "Gemma2Config",
        "Gemma3TextConfig",
        "Phi3Config",
        "GptOssConfig",
        "Olmo2Config",
        "GraniteConfig",
        "SmolLM3Config",
        "Cohere2Config",
        "GPTNeoXConfig",
        "GPT2Config",
    ],
)
def test_served_by_its_configuration(name: str) -> None:
    models.refuse_unsupported(getattr(transformers, name)())


def test_quantized_weights_are_refused() -> None:
    config = small(transformers.LlamaConfig)
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedModelError, match="llama: its weights are quantized"):
        models.refuse_unsupported(config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("LlamaConfig", {}),
        ("Gemma2Config", {"head_dim": 16, "sliding_window": 8}),
        ("GptOssConfig", {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4}),
        ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 8}),
        ("GPTNeoXConfig", {}),
    ],
)
def test_the_probe_finds_the_shape_of_keys_and_values(name: str, changes: dict[str, Any]) -> None:
    config = small(getattr(transformers, name), **changes)
    loaded = models.wrap(build(config), CPU)
    assert loaded.kv_shape.num_layers == 2
    assert loaded.kv_shape.head_dim == 16
    assert loaded.kv_shape.num_kv_heads == (2 if name == "GPTNeoXConfig" else 1)
    sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    assert loaded.kv_shape.windows == tuple(8 if s else 0 for s in (sliding or [False, False]))


def test_heads_that_no_kernel_takes_are_refused() -> None:
    module = build(small(transformers.GemmaConfig, head_dim=512))
    with pytest.raises(UnsupportedModelError, match="gemma: its head dim 512 is over the 256"):
        models.wrap(module, CPU)


class ParallelBias(torch.nn.Module):
    """An attention layer around which state flows."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """Adds the running mean of all tokens in the batch: another row's too."""
        out, weights = self.inner(hidden_states=hidden_states, **kwargs)
        count = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return out + 3 * hidden_states.cumsum(1) / count, weights


def test_state_around_the_interface_is_refused() -> None:
    module = build(small(transformers.LlamaConfig))
    loaded = models.wrap(module, CPU)
    cache = torch.zeros(8, 2, 2, 1, 8, 16)
    context = attention.PagedContext(cache, attention.TorchBackend())
    assert models.check_parity(loaded, context, 8) > 0.999
    for layer in module.model.layers:
        layer.self_attn = ParallelBias(layer.self_attn)
    with pytest.raises(
        UnsupportedModelError, match="llama: its paged logits are not those of eager"
    ):
        models.check_parity(loaded, context, 8)


def test_a_layer_that_skips_the_interface_is_refused() -> None:
    module = build(small(transformers.LlamaConfig))

    class Identity(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            return hidden_states, None

    module.model.layers[1].self_attn = Identity()
    with pytest.raises(UnsupportedModelError, match="1 of 2 layers came through"):
        models.wrap(module, CPU)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias to attention"),
        ({"is_causal": False}, "is not causal"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(
    argument: dict[str, Any], message: str
) -> None:
    module = build(small(transformers.LlamaConfig))
    inner = module.model.layers[0].self_attn
    forward = inner.forward
    inner.forward = lambda **kwargs: forward(**kwargs, **argument)
    with pytest.raises(UnsupportedModelError, match=f"can't serve llama: LlamaAttention {message}"):
        models.wrap(module, CPU)


def test_a_forward_of_another_kind_is_refused() -> None:
    module = build(small(transformers.LlamaConfig))

    def forward(input_ids: torch.Tensor, pixel_values: torch.Tensor) -> None:
        raise AssertionError

    module.forward = forward
    with pytest.raises(UnsupportedModelError, match=r"llama: .*not compute a flat batch .*TypeErr"):
        models.wrap(module, CPU)


def test_pickled_weights_are_refused_and_never_read(tmp_path: Path) -> None:
    small(transformers.LlamaConfig, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(UnsupportedModelError, match=r"no \*.safetensors in .*pytorch_model.bin"):
        models.load(tmp_path, dtype="auto", device=CPU, log=LOG)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    build(small(transformers.LlamaConfig)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="lacks 9 weights of LlamaForCausalLM"):
        models.load(tmp_path, dtype="float32", device=CPU, log=LOG)


def test_code_in_the_model_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(UnsupportedModelError, match="can't serve"):
        models.load(tmp_path, dtype="auto", device=CPU, log=LOG)


@pytest.mark.parametrize("native", [False, True])
def test_auto_dtype_follows_the_cpu(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "native_bfloat16", lambda: native)
    of_bfloat16 = models.choose_dtype("auto", torch.bfloat16, CPU)
    assert of_bfloat16 == (torch.bfloat16 if native else torch.float32)
    assert models.choose_dtype("auto", torch.float32, CPU) == torch.float32
    assert models.choose_dtype("bfloat16", torch.float32, CPU) == torch.bfloat16
    assert models.choose_dtype("float32", torch.bfloat16, CPU) == torch.float32
    cuda = torch.device("cuda")
    assert models.choose_dtype("auto", torch.float16, cuda) == torch.float16
    assert models.choose_dtype("auto", None, cuda) == torch.bfloat16


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
            "factor": 2.0,
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
        },
    ],
)
def test_rotary_scaling_does_not_depend_on_the_batch(scaling: dict[str, Any]) -> None:
    module = build(small(transformers.LlamaConfig, rope_parameters=scaling))
    rotary, x = module.model.rotary_emb, torch.zeros(1, 1, 32)
    near, far = torch.arange(4)[None], torch.arange(200)[None]
    free = rotary(x, near)[0].clone()
    models.fix_rotary(models.wrap(module, CPU), 128)
    fixed = rotary(x, near)[0].clone()
    assert not torch.equal(fixed, free), "the test's scaling does nothing"
    rotary(x, far)
    assert torch.equal(rotary(x, near)[0], fixed)


def test_back_ends_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention.make_backend("torch", CPU).name == "torch"
    monkeypatch.setattr(attention, "no_native", lambda device: None)
    assert attention.make_backend("auto", CPU).name == "native"
    assert attention.make_backend("native", CPU).name == "native"
    monkeypatch.setattr(attention, "no_native", lambda device: "no compiler")
    assert attention.make_backend("auto", CPU).name == "torch"
    with pytest.raises(ValueError, match="native can't run here: no compiler"):
        attention.make_backend("native", CPU)
    monkeypatch.setattr(attention, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        attention.make_backend("triton", CPU)
