"""`evalscope perf` over both interfaces, streamed."""

import json
import sys
from pathlib import Path
from typing import Any

from checks import API_KEY, MODEL, TOKENIZER, V1, WORK, check, equal, main
from load import NUM_AT_ONCE, NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS, run_tool, tool


def perf(path: str) -> dict[str, Any]:
    """The summary of a run against one route."""
    folder = Path(WORK) / path.replace("/", "-")
    run_tool(
        [
            tool("evalscope"), "perf", "--model", MODEL, "--url", f"{V1}/{path}",
            "--api", "openai", "--api-key", API_KEY, "--tokenizer-path", TOKENIZER,
            "--dataset", "random", "--min-prompt-length", "8",
            "--max-prompt-length", str(2 * PROMPT_TOKENS), "--max-tokens", str(OUTPUT_TOKENS),
            "--number", str(NUM_REQUESTS), "--parallel", str(NUM_AT_ONCE), "--stream",
            "--extra-args", json.dumps({"ignore_eos": True}),
            "--outputs-dir", str(folder), "--no-timestamp",
        ]
    )  # fmt: skip
    (summary,) = folder.rglob("benchmark_summary.json")
    return dict(json.loads(summary.read_text()))


@check
def chat() -> None:
    """A run over chats completes, and counts the tokens asked for."""
    _complete(perf("chat/completions"))


@check
def text() -> None:
    """A run over completions completes, and counts the tokens asked for."""
    _complete(perf("completions"))


def _complete(summary: dict[str, Any]) -> None:
    equal((summary["Success Requests"], summary["Failed Requests"]), (NUM_REQUESTS, 0))
    equal(summary["Avg Output Tokens"], float(OUTPUT_TOKENS))
    assert summary["Avg TTFT (ms)"] > 0
    print(f"{summary['Output Throughput (tok/s)']} output tok/s")


if __name__ == "__main__":
    sys.exit(main())
