"""What the worker under clocks leaves behind; imports no torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path

MAX_STEPS = 20_000
EMBED, NORM, STORE, ATTENTION, ACTIVATION = "embed", "norm", "store", "attention", "activation"
QKV, OUT, GATE_UP, DOWN, HEAD = "qkv", "out", "gate_up", "down", "head"
PARTS = (EMBED, NORM, QKV, STORE, ATTENTION, OUT, GATE_UP, ACTIVATION, DOWN, HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of the runner. `contexts` is the sum of the rows' lengths after the step."""

    began_ns: int
    ended_ns: int
    num_rows: int
    num_tokens: int
    contexts: int
    apply_us: int
    forward_us: int
    sample_us: int
    parts_ns: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a run left: its last MAX_STEPS steps, and the bytes of the packed linear weights."""

    steps: list[Step] = field(default_factory=list)
    weight_bytes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Record":
        """What a worker has written."""
        document = json.loads(path.read_text())
        return cls(
            steps=[Step(**step) for step in document["steps"]],
            weight_bytes=document["weight_bytes"],
        )
