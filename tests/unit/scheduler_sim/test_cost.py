"""What a simulated step costs, and that a fit finds it again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.sim import cost_fit
from scheduler_svc.sim.cost import PRESETS, StepCost, kv_tokens
from scheduler_svc.sim.cost_fit import CostError, Observation, fit

counts = st.integers(0, 1 << 20)
parts = st.floats(0.0, 1.0)
costs = st.one_of(
    st.sampled_from(list(PRESETS.values())),
    st.builds(
        StepCost,
        fixed_s=parts,
        weights_s=parts,
        decode_token_s=parts,
        prefill_token_s=parts,
        kv_token_s=parts,
        copied_byte_s=parts,
        overlapped=st.booleans(),
    ),
)


@settings(max_examples=300, deadline=None)
@given(costs, st.tuples(counts, counts, counts, counts), st.integers(0, 3), counts)
def test_more_work_is_never_faster(
    cost: StepCost, work: tuple[int, int, int, int], which: int, more: int
) -> None:
    """Whatever is added to a step that computes something."""
    work = (work[0] + 1, *work[1:])
    added = list(work)
    added[which] += more
    assert cost.seconds(*added) >= cost.seconds(*work)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("which", range(4))
def test_much_more_of_anything_is_slower(name: str, which: int) -> None:
    """Nothing is free in a preset."""
    work = [1, 1, 1, 1]
    before = PRESETS[name].seconds(*work)
    work[which] = 1 << 40
    assert PRESETS[name].seconds(*work) > 2 * before


def test_the_parts_add_up() -> None:
    """Where reading weights and arithmetic do not overlap."""
    cost = StepCost(
        fixed_s=1.0,
        weights_s=2.0,
        decode_token_s=0.1,
        prefill_token_s=0.01,
        kv_token_s=0.001,
        copied_byte_s=0.0001,
    )
    assert cost.seconds(3, 7, 11, 13) == pytest.approx(3.0 + 0.3 + 0.07 + 0.011 + 0.0013)


def test_a_device_reads_weights_while_it_computes() -> None:
    """Rows are free up to the point where arithmetic takes as long as the weights."""
    cost = StepCost(
        fixed_s=1.0, weights_s=2.0, decode_token_s=0.5, prefill_token_s=0.5, overlapped=True
    )
    assert [cost.seconds(n, 0, 0, 0) for n in (1, 4, 6)] == [3.0, 3.0, 4.0]


def test_a_step_of_nothing_costs_its_copies() -> None:
    """An empty plan that asks whether copies are done computes nothing."""
    cost = PRESETS["cpu"]
    assert cost.seconds(0, 0, 0, 0) == 0.0
    assert 0.0 < cost.seconds(0, 0, 0, 1 << 20) < cost.fixed_s


def test_a_context_is_read_once_for_a_tile_of_queries() -> None:
    """A decode reads all tokens up to its own."""
    assert kv_tokens(99, 1) == 100
    assert kv_tokens(0, 64) == 64
    assert kv_tokens(36, 64) == 100
    assert kv_tokens(0, 65) == 130


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), 1e9])
def test_costs_have_bounds(value: float) -> None:
    """Nothing negative, nothing without end."""
    with pytest.raises(ValueError, match="parts of a step's cost"):
        StepCost(fixed_s=value, decode_token_s=0.0, prefill_token_s=0.0)


def test_presets_are_near_what_is_known_of_the_devices() -> None:
    """A decode step of 32 rows: 36 ms of linear layers and head on two cores; on an H100 an 8B

    model reads its 16 GB in 5 to 8 ms.
    """
    assert 0.036 < PRESETS["cpu"].seconds(32, 0, 32 * 256, 0) < 0.06
    assert 0.005 < PRESETS["h100"].seconds(32, 0, 32 * 1_000, 0) < 0.012


# Fits


def observed(cost: StepCost, errors: Callable[[int], float] = lambda _: 0.0) -> list[Observation]:
    """Steps of many kinds, as that cost has them, each off by a relative error."""
    work = [
        (rows, chunk, rows * length + kv_tokens(0, chunk), copied)
        for rows in (0, 1, 8, 32)
        for chunk in (0, 64, 500)
        for length in (20, 700)
        for copied in (0, 1 << 20)
        if rows + chunk
    ]
    return [
        Observation(
            num_decode_tokens=of[0],
            num_prefill_tokens=of[1],
            kv_tokens_read=of[2],
            copied_bytes=of[3],
            seconds=cost.seconds(*of) * (1.0 + errors(number)),
        )
        for number, of in enumerate(work)
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        StepCost,
        fixed_s=st.floats(1e-3, 0.1),
        decode_token_s=st.floats(1e-5, 1e-2),
        prefill_token_s=st.floats(1e-5, 1e-2),
        kv_token_s=st.floats(1e-7, 1e-5),
        copied_byte_s=st.floats(1e-10, 1e-8),
    )
)
def test_a_fit_finds_what_was_planted(planted: StepCost) -> None:
    """Each of five parts, from steps that have them in different measure."""
    found = fit(observed(planted))
    for part in cost_fit.PARTS:
        assert getattr(found.cost, part) == pytest.approx(getattr(planted, part), rel=1e-4)
    assert found.residual_max < 1e-6


def test_the_residual_is_what_the_fit_leaves() -> None:
    """Steps that are off by 5 % up and down leave about 5 %."""
    found = fit(observed(PRESETS["cpu"], lambda number: 0.05 if number % 2 else -0.05))
    assert 0.02 < found.residual_rms <= found.residual_max < 0.12
    assert "relative error" in str(found)


def test_no_part_is_negative() -> None:
    """Not even where steps with more copies happened to be faster."""
    cost = StepCost(fixed_s=0.01, decode_token_s=1e-3, prefill_token_s=1e-3)
    steps = [
        Observation(
            num_decode_tokens=of.num_decode_tokens,
            num_prefill_tokens=of.num_prefill_tokens,
            kv_tokens_read=of.kv_tokens_read,
            copied_bytes=of.copied_bytes,
            seconds=of.seconds * (0.9 if of.copied_bytes else 1.0),
        )
        for of in observed(cost)
    ]
    found = fit(steps).cost
    assert found.copied_byte_s == 0.0
    assert found.fixed_s > 0.0


def test_what_is_known_is_kept() -> None:
    """The rest is fitted around it."""
    planted = PRESETS["cpu"]
    found = fit(observed(planted), {"kv_token_s": planted.kv_token_s}).cost
    assert found.kv_token_s == planted.kv_token_s
    assert found.decode_token_s == pytest.approx(planted.decode_token_s, rel=1e-6)
    with pytest.raises(CostError, match="no parts of a step's cost"):
        fit(observed(planted), {"kv_token": 1.0})


def test_steps_that_are_all_alike_are_refused() -> None:
    """Decodes at one length tell no row from what it reads."""
    decodes = [
        Observation(num_decode_tokens=n, kv_tokens_read=n * 256, seconds=0.01 * n) for n in (1, 8)
    ]
    chunk = Observation(num_prefill_tokens=256, kv_tokens_read=1024, seconds=0.1)
    with pytest.raises(CostError, match="can't tell fixed_s, decode_token_s"):
        fit([*decodes, chunk])
    with pytest.raises(CostError, match="no observation says anything of prefill_token_s"):
        fit(decodes)
    with pytest.raises(CostError, match="no observations"):
        fit([])
    with pytest.raises(CostError, match="observation 0"):
        fit([Observation(num_decode_tokens=-1, seconds=1.0)])


# Files, as the benchmarks write them


def kernels() -> dict[str, Any]:
    """An excerpt in the form of kernels.json: 10 ms a step, 0.5 ms a decode, 2 ns a byte of KV."""

    def step(shape: str, ms: float, backend: str = "native") -> dict[str, Any]:
        return {
            "kernel": "step", "backend": backend, "device": "cpu", "dtype": "bf16",
            "shape": shape, "median_us": ms * 1e3, "gb_per_s": 1.0, "floor_share": 0.1,
            "gflop_per_s": 1.0, "torch_ratio": 1.0,
        }  # fmt: skip

    kv_ms = 23_040 / 10e9 * 1e3  # a token of SmolLM2 in bf16 at 10 GB/s
    return {
        "machine": {},
        "threads": 2,
        "torch": "2.13.0",
        "floor_gb_per_s": {"cpu": 20.0},
        "results": [
            {**step("decode 32 x 509", 0.7), "kernel": "paged_attention", "gb_per_s": 10.0},
            step("decode 1 x 256", 10 + 0.5 + 256 * kv_ms),
            step("decode 8 x 256", 10 + 8 * 0.5 + 8 * 256 * kv_ms),
            step("decode 32 x 256", 10 + 32 * 0.5 + 32 * 256 * kv_ms),
            step("prefill 256 of 256", 10 + 256 * 0.25 + 4 * 256 * kv_ms),
            step("decode 1 x 256", 99.0, "torch"),
        ],
    }


def saved(folder: Path, document: Any) -> Path:
    """As a file."""
    path = folder / "some.json"
    path.write_text(json.dumps(document))
    return path


def test_a_fit_to_the_kernels_benchmark(tmp_path: Path) -> None:
    """Own kernels before torch; KV at the bandwidth of attention, copies at half of the floor's."""
    found = cost_fit.read(saved(tmp_path, kernels()))
    assert found.num_observations == 4
    assert found.cost.fixed_s == pytest.approx(0.010)
    assert found.cost.decode_token_s == pytest.approx(0.0005)
    assert found.cost.prefill_token_s == pytest.approx(0.00025)
    assert found.cost.kv_token_s == pytest.approx(2.304e-6)
    assert found.cost.copied_byte_s == pytest.approx(1e-10)
    assert found.residual_max < 1e-6


def gpu_script() -> dict[str, Any]:
    """An excerpt in the form of gpu.json."""
    decodes = [
        {"check": "decode step", "rows": n, "tokens_each": 512, "step_ms": 4.0 + 0.01 * n}
        for n in (1, 32, 128)
    ]
    return {
        "dry_run": False,
        "packages": {},
        "stages": [
            {
                "stage": "bandwidth",
                "ended": "ok",
                "results": [{"copy_gb_per_s": 3000.0, "product_tflop_per_s": 700.0}],
            },
            {
                "stage": "worker",
                "ended": "ok",
                "results": [
                    {"check": "loaded", "dtype": "float32", "step_us": 1, "token_us": 99.0},
                    {"check": "loaded", "dtype": "bfloat16", "step_us": 4000, "token_us": 8.0},
                    {"check": "swap", "out_gb_per_s": 50.0, "in_gb_per_s": 40.0},
                    *decodes,
                ],
            },
        ],
    }


def test_a_fit_to_the_gpu_script(tmp_path: Path) -> None:
    """The bf16 lines; copies at the slower way."""
    found = cost_fit.read(saved(tmp_path, gpu_script()))
    assert found.num_observations == 4
    assert found.cost.fixed_s == pytest.approx(0.004, rel=0.01)
    assert 0.0 < found.cost.decode_token_s < 0.01e-3
    assert found.cost.prefill_token_s == pytest.approx(8e-6, rel=0.1)
    assert found.cost.kv_token_s == pytest.approx(32_768 / 3000e9)
    assert found.cost.copied_byte_s == pytest.approx(1 / 40e9)


def test_a_workers_profile_is_taken_as_it_is(tmp_path: Path) -> None:
    """As in Hello; a bandwidth that was not measured is 0 there."""
    profile = {"step_us": 20_000.0, "token_us": 500.0, "swap_out_gb_per_s": 5.0}
    found = cost_fit.read(saved(tmp_path, {**profile, "swap_in_gb_per_s": 0.0})).cost
    assert found.seconds(1, 10, 5_000, 0) == pytest.approx(0.0255)
    assert found.copied_byte_s == pytest.approx(2e-10)


def test_steps_that_somebody_timed(tmp_path: Path) -> None:
    """Give the cost they have."""
    steps = [
        {
            "num_decode_tokens": of.num_decode_tokens,
            "num_prefill_tokens": of.num_prefill_tokens,
            "kv_tokens_read": of.kv_tokens_read,
            "copied_bytes": of.copied_bytes,
            "seconds": of.seconds,
        }
        for of in observed(PRESETS["cpu"])
    ]
    found = cost_fit.read(saved(tmp_path, {"observations": steps}))
    assert found.cost.seconds(4, 9, 900, 0) == pytest.approx(PRESETS["cpu"].seconds(4, 9, 900, 0))


def without(document: Any, *path: str | int) -> Any:
    """The document without what stands there."""
    at = document
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return document


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ([], "not a JSON object"),
        ({"rows": [], "study": "d"}, "none of observations, step_us"),
        ({"points": [], "machine": {}}, "none of observations, step_us"),
        (without(kernels(), "results"), "no results"),
        (without(kernels(), "results", 1, "median_us"), "kernel step: median_us is no number"),
        (without(kernels(), "results", 0), "paged_attention, decode 32 x 509, native, bf16: no gb"),
        ({**kernels(), "results": kernels()["results"][:2]}, "no observation says anything of pre"),
        ({**kernels(), "floor_gb_per_s": {"cuda": 1.0}}, "floor_gb_per_s: cpu is no number"),
        ({**gpu_script(), "dry_run": True}, "dry run"),
        (without(gpu_script(), "dry_run"), "dry run"),
        (without(gpu_script(), "stages", 0), "stage bandwidth: no copy_gb_per_s"),
        (without(gpu_script(), "stages", 1), "stage worker, loaded, bfloat16: no token_us"),
        (without(gpu_script(), "stages", 1, "results", 2), "stage worker: no in_gb_per_s"),
        (without(gpu_script(), "stages", 1, "results", 4, "step_ms"), "step_ms is no number"),
        ({"step_us": 5.0}, "cost profile: token_us is no number"),
        ({"step_us": 5.0, "token_us": -1.0}, "cost profile: token_us is -1.0"),
        ({"observations": [{"num_decode_tokens": 1}]}, "observation 0: num_prefill_tokens is no"),
        ({"observations": {}}, "observations is no list"),
    ],
)
def test_a_file_without_what_is_needed_is_refused(tmp_path: Path, document: Any, why: str) -> None:
    """By the name of the field."""
    path = saved(tmp_path, document)
    with pytest.raises(CostError) as caught:
        cost_fit.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert why in str(caught.value)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """Or that is not there."""
    path = tmp_path / "some.json"
    with pytest.raises(CostError, match=r"some\.json"):
        cost_fit.read(path)
    path.write_text("{")
    with pytest.raises(CostError, match=r"some\.json"):
        cost_fit.read(path)
