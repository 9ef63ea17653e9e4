"""lm-eval's local-completions: a task of choices, its scores held against transformers' own."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from checks import API_KEY, MODEL, TOKENIZER, V1, WORK, check, equal, main

HERE = Path(__file__).resolve().parent
TASKS = HERE.parent / "tasks"
PYTHON_WITH_TORCH = os.environ["CLIENTS_PYTHON"]
TOLERANCE = float(os.environ["CLIENTS_TOLERANCE"])


@cache
def evaluate(task: str, batch_size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and samples of a run."""
    folder = Path(WORK) / f"{task}-{batch_size}"
    arguments = {
        "model": MODEL, "base_url": f"{V1}/completions", "tokenizer_backend": "huggingface",
        "tokenizer": TOKENIZER, "num_concurrent": 2, "max_retries": 1,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--tasks", task, "--include_path", str(TASKS), "--batch_size", str(batch_size),
        "--log_samples", "--output_path", str(folder),
    ]  # fmt: skip
    environ = {**os.environ, "OPENAI_API_KEY": API_KEY, "HF_HOME": str(Path(WORK) / "hf")}
    done = subprocess.run(
        command, cwd=TASKS, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    lines = samples.read_text().splitlines()
    return json.loads(results.read_text())["results"][task], [json.loads(line) for line in lines]


def scores(samples: list[dict[str, Any]]) -> list[tuple[list[str], float, bool]]:
    """Context and choice, log likelihood, greediness."""
    found = []
    for sample in sorted(samples, key=lambda s: s["doc_id"]):
        asked = sample["arguments"]
        pairs = asked.values() if isinstance(asked, dict) else asked
        for pair, (answer,) in zip(pairs, sample["resps"], strict=True):
            texts = list(pair.values()) if isinstance(pair, dict) else list(pair)
            found.append((texts, float(answer[0]), str(answer[1]) == "True"))
    return found


@check
def loglikelihoods() -> None:
    """Scores of choices are transformers' own."""
    _, samples = evaluate("quire_capitals", 1)
    got = scores(samples)
    equal(len(got), 32)
    done = subprocess.run(
        [PYTHON_WITH_TORCH, str(HERE / "loglikelihoods.py"), TOKENIZER],
        input=json.dumps([pair for pair, _, _ in got]),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    worst = 0.0
    for (pair, total, greedy), (want, want_greedy) in zip(
        got, json.loads(done.stdout), strict=True
    ):
        worst = max(worst, abs(total - want))
        assert abs(total - want) <= TOLERANCE, f"{pair}: {total} and not {want}"
        equal((pair, greedy), (pair, want_greedy))
    print(f"largest difference of {len(got)} log likelihoods: {worst:.2g}")


@check
def batches() -> None:
    """Several prompts a request give the same scores."""
    one, several = (scores(evaluate("quire_capitals", n)[1]) for n in (1, 4))
    for (pair, first, _), (same, second, _) in zip(one, several, strict=True):
        equal(pair, same)
        assert abs(first - second) <= TOLERANCE, f"{pair}: {first} and {second}"


@check
def accuracy() -> None:
    """The task's accuracy is reported."""
    results, _ = evaluate("quire_capitals", 1)
    assert 0 < results["acc,none"] <= 1, results
    print(f"accuracy {results['acc,none']}")


@check
def generation() -> None:
    """Generation stops at the task's stop string."""
    _, samples = evaluate("quire_going_on", 1)
    texts = [sample["resps"][0][0] for sample in samples]
    equal(len(texts), 8)
    assert all("\n" not in text for text in texts), texts
    assert sum(map(bool, texts)) >= 4, texts


if __name__ == "__main__":
    sys.exit(main())
