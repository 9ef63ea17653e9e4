"""Without native kernels a worker says so once, and early refuses what only they give."""

import json
from pathlib import Path

import pytest
import structlog
import torch

from gpu_worker import models
from gpu_worker.attention import UnsupportedModelError
from kernels.native import library
from tests.tiny_llama import load_llama, write_llama


@pytest.mark.parametrize(
    ("backend", "device", "missing", "reason"),
    [
        ("torch", "cpu", "no C++ compiler", "it takes the native kernels: no C++ compiler"),
        ("triton", "cuda", None, "it takes the native kernels: they are for CPUs"),
        ("torch", "cpu", None, "the torch back end computes attention"),
    ],
)
def test_the_refusal_names_its_cause(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, missing: str | None, reason: str
) -> None:
    if device == "cpu":
        monkeypatch.setattr(models, "no_native", lambda device: missing)
    for deterministic, name, asked in (
        (False, "int8", "QUIRE_QUANTIZATION=int8"),
        (True, "none", "QUIRE_DETERMINISTIC=1"),
        (True, "int4", "QUIRE_DETERMINISTIC=1 and QUIRE_QUANTIZATION=int4"),
    ):
        with pytest.raises(UnsupportedModelError) as refused:
            models.refuse_without_native(
                "small",
                backend,
                torch.device(device),
                wanted=True,
                deterministic=deterministic,
                quantization=name,
            )
        assert str(refused.value) == f"can't serve small with {asked}: {reason}"


def test_who_asks_for_neither_is_not_refused() -> None:
    models.refuse_without_native(
        "small",
        "torch",
        torch.device("cpu"),
        wanted=False,
        deterministic=False,
        quantization="none",
    )


def test_it_is_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="QUIRE_QUANTIZATION=int8: "):
        load_llama(tmp_path, quantization="int8", attention_backend="torch")


def test_missing_kernels_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "reason_unavailable", lambda: "no C++ compiler")
    with structlog.testing.capture_logs() as said:
        load_llama(write_llama(tmp_path), attention_backend="auto")
    warnings = [entry for entry in said if "no native kernels" in entry["event"]]
    assert [(entry["log_level"], entry["reason"]) for entry in warnings] == [
        ("warning", "no C++ compiler")
    ]
