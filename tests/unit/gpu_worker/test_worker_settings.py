"""Settings match the catalogue; the service side starts without torch."""

import dataclasses
import subprocess
import sys

import pytest

from gpu_worker import settings
from gpu_worker.settings import WorkerSettings
from servicekit.catalogue import CATALOGUE, WORKER
from servicekit.settings import SettingsError
from tests.stub_worker.__main__ import options_for

SERVICE_MODULES = [
    "__main__",
    "app",
    "batch",
    "codec",
    "digest",
    "executor",
    "grpc_service",
    "messages",
    "metrics",
    "operations",
    "ports",
    "replica",
    "session",
    "settings",
    "slot_table",
    "token_hub",
]


def test_settings_are_those_of_the_catalogue() -> None:
    names = {setting.name for setting in CATALOGUE if WORKER in setting.services}
    assert {field.name for field in dataclasses.fields(WorkerSettings)} == names


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    read = settings.load(
        ["--block-size", "32"],
        {"QUIRE_BLOCK_SIZE": "64", "QUIRE_MAX_NUM_SEQS": "7", "QUIRE_PORT": "1"},
    )
    assert (read.block_size, read.max_num_seqs, read.outbox_batches) == (32, 7, 4096)


def test_swap_space_is_by_memory_unless_it_is_set() -> None:
    assert settings.load([], {}).swap_space_gib == -1.0
    assert settings.load([], {"QUIRE_SWAP_SPACE_GIB": "0"}).swap_space_gib == 0.0
    assert settings.load([], {"QUIRE_SWAP_SPACE_GIB": "2.5"}).swap_space_gib == 2.5
    with pytest.raises(SettingsError, match="QUIRE_SWAP_SPACE_GIB"):
        settings.load([], {"QUIRE_SWAP_SPACE_GIB": "-2"})


def test_quantization_is_one_of_three() -> None:
    assert settings.load([], {}).quantization == "none"
    assert settings.load([], {"QUIRE_QUANTIZATION": "INT8"}).quantization == "int8"
    assert settings.load(["--quantization", "int4"], {}).quantization == "int4"
    with pytest.raises(
        SettingsError, match="QUIRE_QUANTIZATION='int2': must be one of none, int8, int4"
    ):
        settings.load([], {"QUIRE_QUANTIZATION": "int2"})


@pytest.mark.parametrize(("gib", "expected"), [("", 4096), ("0", 0), ("0.5", 2**19)])
def test_the_stub_takes_its_host_blocks_from_the_same_setting(gib: str, expected: int) -> None:
    read = settings.load(["--model", "none"], {"QUIRE_SWAP_SPACE_GIB": gib})
    assert options_for(read, {}).num_host_blocks == expected
    assert options_for(read, {"STUB_NUM_HOST_BLOCKS": "7"}).num_host_blocks == 7


@pytest.mark.parametrize("variable", ["QUIRE_BLOCK_SIZ", "QUIRE_BLOCK_SIZE"])
def test_a_bad_variable_is_named(variable: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        settings.load([], {variable: "1000"})


def test_the_service_side_does_not_import_torch() -> None:
    modules = ", ".join(f"gpu_worker.{name}" for name in SERVICE_MODULES)
    code = (
        f"import sys, {modules}, tests.stub_worker.__main__\n"
        "heavy = {'torch', 'triton', 'transformers', 'kernels'} & set(sys.modules)\n"
        "sys.exit(' '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
