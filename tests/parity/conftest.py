"""The small models, their references and their runners, made once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.ports import ModelRunner
from tests.parity import families
from tests.parity.comparing import runner_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """One family's small model."""

    folder: Path
    reference: Any
    runners: tuple[ModelRunner, ModelRunner]
    cramped: ModelRunner  # room for about two of the longer requests


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Small]:
    """Makes a family's small model, on the back end that `auto` chooses or on a named one."""

    @cache
    def saved(family: str) -> tuple[Path, Any]:
        folder = families.save(family, tmp_path_factory.mktemp(family))
        return folder, families.reference(folder)

    @cache
    def make(family: str, backend: str = "auto") -> Small:
        folder, reference = saved(family)
        on: dict[str, Any] = {"attention_backend": backend.removesuffix(" alone")}
        on["fused"] = not backend.endswith(" alone")
        return Small(
            folder=folder,
            reference=reference,
            runners=(runner_of(folder, **on), runner_of(folder, **on)),
            cramped=runner_of(folder, num_gpu_blocks_override=44, **on),
        )

    return make
