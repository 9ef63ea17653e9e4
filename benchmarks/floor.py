"""What this machine can do today, by plain torch: bandwidth, linear layers, paged attention.

`python -m benchmarks.floor [--dtype fp32] [--threads N] [--quick]` prints JSON. benchmarks.serving
runs it in a process of its own, before any stack. Shapes are those of SmolLM2-135M: 30 layers of
width 576, 9 query and 3 KV heads of 64, 1,536 in the MLP, 49,152 tokens. Weights of all layers are
walked over, so that they come from memory, as in a step.

The ceiling of output tokens with 32 clients is what a machine would give that did nothing but

- linear layers of 64 rows: with prompts as long as answers (64 to 192 tokens both) each step has a
  token of a prompt for each of its 32 decodes,
- the head of 32 rows, for nothing is sampled from a prompt,
- reading 32 requests' keys and values at the day's rate of reading memory. A request has its prompt
  and on average, step by step, a bit more than half of its answer: 197 tokens.

Linear layers and the head take the shortest time of torch's plain layers, torch's packed for
oneDNN and the native kernels. Left out are norms, rotary, sampling, attention's arithmetic and its
queries, the scheduler, the gateway and the client, and that the batch is not full while a load
begins and ends: nothing reaches this ceiling.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

NUM_LAYERS, WIDTH, KV_WIDTH, INNER, VOCABULARY = 30, 576, 192, 1536, 49_152
SHAPES = (  # (columns, depth): query, key, value, output, gate, up, down
    (WIDTH, WIDTH), (KV_WIDTH, WIDTH), (KV_WIDTH, WIDTH), (WIDTH, WIDTH),
    (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER),
)  # fmt: skip
JOINED = (  # as they are served: query, key and value in one, gate and up in one
    (WIDTH + 2 * KV_WIDTH, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER),
)  # fmt: skip
ROWS = (1, 8, 32)
CLIENTS, PROMPT_TOKENS = 32, 32  # of a step of the ceiling
CONTEXT = 197  # 128 + (128^2 + 129^2 / 12) / 256: of a uniform length, weighted by its steps
WEIGHT = 2.0**-7  # held by bf16, as this model's weights are
READ_BYTES, QUICK_BYTES = 512 << 20, 64 << 20
BUDGET_S, QUICK_BUDGET_S = 2.0, 0.2
ATTENTION, ATTENTION_SHAPE = "paged_attention", "decode 32 x 509"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Medians of one run. Figures of attention are of KV read once, one layer."""

    dtype: str
    threads: int
    native: bool  # whether there are native kernels
    read_gb_per_s: float
    copy_gb_per_s: float
    linear_ms: dict[str, float] = field(default_factory=dict)  # all layers, by number of rows
    head_ms: dict[str, float] = field(default_factory=dict)
    attention_gb_per_s: dict[str, float] = field(default_factory=dict)  # by back end
    ceiling_ms: dict[str, float] = field(default_factory=dict)  # of a step, by part

    @property
    def ceiling_tok_per_s(self) -> float:
        """Output tokens a second of 32 clients, if a step had nothing but its parts."""
        return CLIENTS / sum(self.ceiling_ms.values()) * 1e3

    def step_ms(self, rows: int) -> float:
        """Linear layers and head of a step of so many rows."""
        return self.linear_ms[str(rows)] + self.head_ms[str(rows)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def probe(dtype: str, threads: int, *, quick: bool) -> Floor:
    """Measures, in this process."""
    import torch
    import torch.nn.functional as F

    from benchmarks import kernel_cases, kernels
    from gpu_worker.runner import keep_freed_memory
    from kernels.native import library

    torch.set_num_threads(threads)
    keep_freed_memory()
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    of = kernels.DTYPES[dtype]

    def seconds(*functions: Callable[[], Any]) -> tuple[float, ...]:
        return kernels.medians_s(functions, "cpu", budget_s)

    source = torch.ones((QUICK_BYTES if quick else READ_BYTES) // 4)
    target = torch.empty_like(source)
    read_s, copy_s = seconds(source.sum, lambda: target.copy_(source))
    layers = [[torch.full(shape, WEIGHT, dtype=of) for shape in SHAPES] for _ in range(NUM_LAYERS)]
    head = torch.full((VOCABULARY, WIDTH), WEIGHT, dtype=of)
    linear_ms, head_ms = {}, {}
    with torch.inference_mode():
        for rows in ROWS:
            inputs = {depth: torch.ones((rows, depth), dtype=of) for depth in (WIDTH, INNER)}

            def all_layers(x: dict[int, Any] = inputs) -> None:
                for weights in layers:
                    for weight in weights:
                        F.linear(x[weight.shape[1]], weight)

            def only_head(x: Any = inputs[WIDTH]) -> None:
                F.linear(x, head)

            step_s, last_s = seconds(all_layers, only_head)
            linear_ms[str(rows)] = round(step_s * 1e3, 2)
            head_ms[str(rows)] = round(last_s * 1e3, 2)
        attention = _attention(kernel_cases, kernels, of, dtype, budget_s)
        layers_s = _least_s(seconds, JOINED * NUM_LAYERS, CLIENTS + PROMPT_TOKENS, of)
        last_s = _least_s(seconds, ((VOCABULARY, WIDTH),), CLIENTS, of)
    kv_bytes = CLIENTS * CONTEXT * 2 * KV_WIDTH * of.itemsize * NUM_LAYERS
    return Floor(
        dtype=dtype,
        threads=threads,
        native=library.reason_unavailable() is None,
        read_gb_per_s=round(source.nbytes / read_s / 1e9, 1),
        copy_gb_per_s=round(2 * source.nbytes / copy_s / 1e9, 1),
        linear_ms=linear_ms,
        head_ms=head_ms,
        attention_gb_per_s=attention,
        ceiling_ms={
            "linear layers": round(layers_s * 1e3, 2),
            "head": round(last_s * 1e3, 2),
            "keys and values": round(kv_bytes / source.nbytes * read_s * 1e3, 2),
        },
    )


def _least_s(
    seconds: Callable[..., tuple[float, ...]], shapes: Sequence[Any], rows: int, of: Any
) -> float:
    """Of all layers of these shapes one after the other, on the back end that takes least."""
    import torch
    from torch import nn

    from kernels.native import library, linear

    inputs = {depth: torch.ones((rows, depth), dtype=of) for _, depth in shapes}
    kinds: list[Callable[[Any], Any]] = [
        lambda weight: partial(nn.functional.linear, weight=weight)
    ]
    if library.reason_unavailable() is None:
        kinds.append(linear.PackedLinear)
    if of == torch.float32 or linear.onednn_takes_bf16():
        kinds.append(linear.OneDnnLinear)
    times: list[float] = []
    for kind in kinds:  # one after the other: all weights of all kinds would be much memory
        made = [(depth, kind(torch.full((n, depth), WEIGHT, dtype=of))) for n, depth in shapes]

        def walk(layers: Any = made) -> None:
            for depth, layer in layers:
                layer(inputs[depth])

        times.extend(seconds(walk))
    return min(times)


def _attention(cases: Any, kernels: Any, of: Any, dtype: str, budget_s: float) -> dict[str, float]:
    """GB/s of KV by back end: gathered by torch, and over the blocks where there are kernels.

    As linear layers are: all of a step, one after the other.
    """
    case = next(
        case
        for case in cases.cases(of, dtype, "cpu", quick=False)
        if (case.kernel, case.shape) == (ATTENTION, ATTENTION_SHAPE)
    )
    names = [name for name in kernels.backends("cpu") if name in case.calls]

    def all_layers(attend: Callable[[], Any]) -> None:
        for _ in range(NUM_LAYERS):
            attend()

    times = kernels.medians_s([partial(all_layers, case.calls[n]) for n in names], "cpu", budget_s)
    layers_gb = case.num_bytes * NUM_LAYERS / 1e9
    return {name: round(layers_gb / time, 2) for name, time in zip(names, times, strict=True)}


def in_a_process(dtype: str, *, quick: bool) -> Floor:
    """As `probe`, with all cores, in a process that gives its memory back. Raises OSError."""
    command = [sys.executable, "-m", "benchmarks.floor", *(["--dtype", dtype] if dtype else [])]
    command += ["--quick"] if quick else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise OSError(f"the floor could not be measured: {ended.stderr[-500:]}")
    return Floor(**json.loads(ended.stdout))


def main(argv: Sequence[str]) -> None:
    """Prints the figures as JSON."""
    import torch

    from benchmarks import kernel_cases

    parser = argparse.ArgumentParser(prog="python -m benchmarks.floor", description=__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default=kernel_cases.usual_dtype())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    floor = probe(options.dtype, options.threads, quick=options.quick)
    sys.stdout.write(json.dumps(floor.as_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
