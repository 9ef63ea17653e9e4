"""Fits a step's cost to what benchmarks measured, and says how well it fits.

What is read, and which fields of it (a file without one of them is refused by its name):

- `kernels.json` (make bench-kernels): of `results` those with kernel `step`: device, dtype,
  backend, shape, median_us; those with kernel `paged_attention` at 32 decodes: gb_per_s, for the
  time of a KV token; `floor_gb_per_s`, for copies.
- `gpu.json` (the GPU script): of the stage `worker` the bf16 lines `loaded` (step_us, token_us),
  `swap` (out_gb_per_s, in_gb_per_s) and `decode step` (rows, tokens_each, step_ms); of the stage
  `bandwidth` copy_gb_per_s, for the time of a KV token.
- a worker's cost profile, `{"step_us", "token_us", "swap_out_gb_per_s", "swap_in_gb_per_s"}`, as a
  worker says it in Hello. A decode costs there what a token of a prompt does.
- `{"observations": [{"num_decode_tokens", "num_prefill_tokens", "kv_tokens_read", "copied_bytes",
  "seconds"}, ...]}`: steps that somebody timed.

The fit is least squares of relative errors, since steps of 20 ms and of 2 s count alike, over the
sum of a fixed time, decode tokens, prompt tokens, KV tokens and copied bytes; none is let below 0.
Weights are part of the fixed time: no number of rows in a file tells them apart.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.sim.cost import SMOLLM2_135M, StepCost, kv_tokens

MAX_FILE_BYTES = 64 << 20
MAX_OBSERVATIONS = 1_000_000
PARTS = ("fixed_s", "decode_token_s", "prefill_token_s", "kv_token_s", "copied_byte_s")
# Of the shape that the GPU script serves, bf16: 16 layers of 8 KV heads of 64.
GPU_SCRIPT_KV_BYTES = 16 * 2 * 8 * 64 * 2
GPU_SCRIPT_CHUNK = 2048
_Floats = npt.NDArray[np.float64]
_DECODES = re.compile(r"decode (\d+) x (\d+)")
_PREFILL = re.compile(r"prefill (\d+) of (\d+)")
_ATTENTION = "decode 32 x 509"


class CostError(ValueError):
    """A file or a set of observations that no cost can be fitted to; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A step that took so long. Counts as in StepCost.seconds."""

    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    kv_tokens_read: int = 0
    copied_bytes: int = 0
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The cost, and the relative errors it leaves: root of the mean square, and the largest."""

    cost: StepCost
    num_observations: int
    residual_rms: float
    residual_max: float

    def __str__(self) -> str:
        cost = self.cost
        return (
            f"{cost.fixed_s * 1e3:.3f} ms a step, {cost.decode_token_s * 1e6:.1f} us a decode, "
            f"{cost.prefill_token_s * 1e6:.1f} us a prompt token, "
            f"{cost.kv_token_s * 1e9:.1f} ns a KV token, "
            f"{cost.copied_byte_s * 1e9:.3f} ns a copied byte; {self.num_observations} steps, "
            f"relative error {self.residual_rms:.1%} (root mean square), "
            f"{self.residual_max:.1%} at most"
        )


def fit(observations: Iterable[Observation], known: Mapping[str, float] | None = None) -> Fit:
    """The cost nearest to the observations; `known` parts are kept as given. Raises CostError.

    A part that no observation has anything of, and that is not known, is 0, except decodes and
    prompt tokens: a worker that does only one of them is not a worker.
    """
    rows, times = _columns(observations)
    given = dict(known or {})
    if unknown := set(given) - set(PARTS):
        raise CostError(f"no parts of a step's cost: {sorted(unknown)}")
    free = []
    for at, part in enumerate(PARTS):
        if part in given:
            continue
        if rows[:, at].any():
            free.append(at)
        elif part in ("decode_token_s", "prefill_token_s"):
            raise CostError(f"no observation says anything of {part}")
    fixed = np.array([given.get(part, 0.0) for part in PARTS])
    found = fixed.copy()
    found[free] = _not_negative(rows[:, free], times - rows @ fixed, times, free)
    errors = (rows @ found) / times - 1.0
    fixed_s, decode_token_s, prefill_token_s, kv_token_s, copied_byte_s = found.tolist()
    return Fit(
        cost=StepCost(
            fixed_s=fixed_s,
            decode_token_s=decode_token_s,
            prefill_token_s=prefill_token_s,
            kv_token_s=kv_token_s,
            copied_byte_s=copied_byte_s,
        ),
        num_observations=len(times),
        residual_rms=float(np.sqrt(np.mean(errors**2))),
        residual_max=float(np.abs(errors).max()),
    )


def _columns(observations: Iterable[Observation]) -> tuple[_Floats, _Floats]:
    rows, times = [], []
    for number, of in enumerate(observations):
        if number >= MAX_OBSERVATIONS:
            raise CostError(f"more than {MAX_OBSERVATIONS} observations")
        counts = (
            of.num_decode_tokens, of.num_prefill_tokens, of.kv_tokens_read, of.copied_bytes,
        )  # fmt: skip
        if min(counts) < 0 or not (0.0 < of.seconds < math.inf):
            raise CostError(f"observation {number}: counts are 0 or more, times above 0")
        rows.append((1, *counts))
        times.append(of.seconds)
    if not rows:
        raise CostError("there are no observations")
    return np.array(rows, dtype=np.float64), np.array(times)


def _not_negative(
    columns: _Floats, wanted: _Floats, times: _Floats, names: Sequence[int]
) -> _Floats:
    """Least squares of relative errors; parts that come out negative are 0, one after another."""
    weighted = columns / times[:, None]
    scale = np.sqrt((weighted**2).sum(axis=0))
    weighted = weighted / scale
    if np.linalg.matrix_rank(weighted) < columns.shape[1]:
        parts = ", ".join(PARTS[at] for at in names)
        raise CostError(
            f"these {len(times)} observations can't tell {parts} apart: more kinds of steps are "
            "needed, or a part that is known"
        )
    kept = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    while kept:
        solved = np.linalg.lstsq(weighted[:, kept], wanted / times, rcond=None)[0]
        worst = int(solved.argmin())
        if solved[worst] >= 0.0:
            found[kept] = solved
            break
        del kept[worst]
    answer: _Floats = found / scale
    return answer


# Files


def read(path: Path, backend: str | None = None, dtype: str | None = None) -> Fit:
    """Fits what a file of one of the kinds above holds. Raises CostError, which names the file.

    backend and dtype choose among the lines of kernels.json: the native (or, without one, torch's)
    forward and the faster dtype if None.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CostError(f"more than {MAX_FILE_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise CostError("not a JSON object")
        return _of(document, backend, dtype)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, CostError) as error:
        raise CostError(f"{path}: {error}") from error


def _of(document: dict[str, Any], backend: str | None, dtype: str | None) -> Fit:
    if "observations" in document:
        return fit(_observations(document["observations"]))
    if "step_us" in document:
        return _profile(document)
    if "stages" in document:
        return _gpu_script(document)
    if "floor_gb_per_s" in document:
        return _kernels(document, backend, dtype)
    raise CostError(
        "none of observations, step_us (a cost profile), stages (gpu.json) and floor_gb_per_s "
        "(kernels.json) is in it"
    )


def _number(of: Mapping[str, Any], field: str, where: str) -> float:
    value = of.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CostError(f"{where}: {field} is no number")
    if not 0.0 <= value < math.inf:
        raise CostError(f"{where}: {field} is {value}")
    return float(value)


def _positive(of: Mapping[str, Any], field: str, where: str) -> float:
    value = _number(of, field, where)
    if not value:
        raise CostError(f"{where}: {field} is 0")
    return value


def _observations(lines: Any) -> Iterator[Observation]:
    if not isinstance(lines, list):
        raise CostError("observations is no list")
    counts = ("num_decode_tokens", "num_prefill_tokens", "kv_tokens_read", "copied_bytes")
    for number, line in enumerate(lines):
        where = f"observation {number}"
        if not isinstance(line, dict):
            raise CostError(f"{where}: not a JSON object")
        values = {name: int(_number(line, name, where)) for name in counts}
        yield Observation(**values, seconds=_positive(line, "seconds", where))


def _profile(document: dict[str, Any]) -> Fit:
    step_s = _number(document, "step_us", "cost profile") / 1e6
    token_s = _number(document, "token_us", "cost profile") / 1e6
    ways = [
        _number(document, f"swap_{way}_gb_per_s", "cost profile")
        for way in ("out", "in")
        if f"swap_{way}_gb_per_s" in document
    ]
    return Fit(
        cost=StepCost(
            fixed_s=step_s,
            decode_token_s=token_s,
            prefill_token_s=token_s,
            copied_byte_s=_of_gb_per_s(ways),
        ),
        num_observations=2,
        residual_rms=0.0,
        residual_max=0.0,
    )


def _of_gb_per_s(ways: Sequence[float]) -> float:
    """Seconds a byte at the slowest way that was measured; 0 if none was."""
    slowest = min((way for way in ways if way), default=0.0)
    return 1e-9 / slowest if slowest else 0.0


def _gpu_script(document: dict[str, Any]) -> Fit:
    if document.get("dry_run") is not False:
        raise CostError("the times of a dry run mean nothing")
    lines = {"worker": [], "bandwidth": []}  # type: dict[str, list[dict[str, Any]]]
    for stage in document["stages"]:
        if isinstance(stage, dict) and stage.get("stage") in lines:
            lines[stage["stage"]] += [line for line in stage["results"] if isinstance(line, dict)]
    copy = _one(lines["bandwidth"], "copy_gb_per_s", "stage bandwidth")
    worker = lines["worker"]
    loaded = _one(
        [of for of in worker if of.get("check") == "loaded" and of.get("dtype") == "bfloat16"],
        "token_us",
        "stage worker, loaded, bfloat16",
    )
    swap = _one([of for of in worker if of.get("check") == "swap"], "in_gb_per_s", "stage worker")
    where = "stage worker, decode step"
    observations = [
        Observation(
            num_decode_tokens=(rows := int(_positive(of, "rows", where))),
            kv_tokens_read=rows * int(_positive(of, "tokens_each", where)),
            seconds=_positive(of, "step_ms", where) / 1e3,
        )
        for of in worker
        if of.get("check") == "decode step"
    ]
    where = "stage worker, loaded, bfloat16"
    chunk_us = _positive(loaded, "step_us", where) + GPU_SCRIPT_CHUNK * _positive(
        loaded, "token_us", where
    )
    observations.append(
        Observation(
            num_prefill_tokens=GPU_SCRIPT_CHUNK,
            kv_tokens_read=kv_tokens(0, GPU_SCRIPT_CHUNK),
            seconds=chunk_us / 1e6,
        )
    )
    known = {
        "kv_token_s": GPU_SCRIPT_KV_BYTES
        / (_positive(copy, "copy_gb_per_s", "stage bandwidth") * 1e9),
        "copied_byte_s": _of_gb_per_s(
            [_number(swap, f"{way}_gb_per_s", "stage worker, swap") for way in ("out", "in")]
        ),
    }
    return fit(observations, known)


def _one(lines: Sequence[dict[str, Any]], field: str, where: str) -> dict[str, Any]:
    """The last of the lines, which must have the field."""
    if not lines or field not in lines[-1]:
        raise CostError(f"{where}: no {field}")
    return lines[-1]


def _kernels(document: dict[str, Any], backend: str | None, dtype: str | None) -> Fit:
    results = document.get("results")
    if not isinstance(results, list):
        raise CostError("no results")
    where = "results, kernel step"
    steps: dict[tuple[str, str], list[Observation]] = {}
    for line in results:
        if isinstance(line, dict) and line.get("kernel") == "step":
            of = (str(line.get("backend")), str(line.get("dtype")))
            steps.setdefault(of, []).append(_step_of(line, where))
    wanted = [
        of for of in steps if backend in (None, of[0]) and dtype in (None, of[1])
    ]  # fmt: skip
    if backend is None and any(of[0] == "native" for of in wanted):
        wanted = [of for of in wanted if of[0] == "native"]
    if not wanted:
        raise CostError(f"{where}: none of back end {backend or 'any'}, dtype {dtype or 'any'}")
    chosen = min(wanted, key=lambda of: sum(step.seconds for step in steps[of]))
    read_by = "torch" if chosen[0] == "torch" else "native"
    attention = [
        line
        for line in results
        if isinstance(line, dict)
        and (line.get("kernel"), line.get("shape")) == ("paged_attention", _ATTENTION)
        and (line.get("backend"), line.get("dtype")) == (read_by, chosen[1])
    ]
    where = f"results, kernel paged_attention, {_ATTENTION}, {read_by}, {chosen[1]}"
    read_gb_per_s = _positive(_one(attention, "gb_per_s", where), "gb_per_s", where)
    kv_bytes = SMOLLM2_135M.kv_bytes_per_token * (2 if chosen[1] == "fp32" else 1)
    floors = document["floor_gb_per_s"]
    if not isinstance(floors, dict):
        raise CostError("floor_gb_per_s: not by device")
    known = {
        "kv_token_s": kv_bytes / (read_gb_per_s * 1e9),
        # The floor counts bytes read and bytes written.
        "copied_byte_s": 2e-9 / _positive(floors, "cpu", "floor_gb_per_s"),
    }
    return fit(steps[chosen], known)


def _step_of(line: Mapping[str, Any], where: str) -> Observation:
    shape = str(line.get("shape"))
    seconds = _positive(line, "median_us", where) / 1e6
    if found := _DECODES.fullmatch(shape):
        rows, length = int(found[1]), int(found[2])
        return Observation(num_decode_tokens=rows, kv_tokens_read=rows * length, seconds=seconds)
    if found := _PREFILL.fullmatch(shape):
        num_tokens, length = int(found[1]), int(found[2])
        return Observation(
            num_prefill_tokens=num_tokens,
            kv_tokens_read=kv_tokens(length - num_tokens, num_tokens),
            seconds=seconds,
        )
    raise CostError(f"{where}: shape {shape!r} is neither decodes nor a prefill")
