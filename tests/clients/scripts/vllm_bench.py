"""`vllm bench serve` over both interfaces, streamed."""

import json
import sys
from pathlib import Path

from checks import BASE_URL, MODEL, TOKENIZER, WORK, check, equal, main
from load import NUM_AT_ONCE, NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS, run_tool


def bench(backend: str, endpoint: str) -> None:
    """A run against one route; every request must complete with the tokens asked for."""
    name = f"{backend}.json"
    run_tool(
        [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
            "--backend", backend, "--base-url", BASE_URL, "--endpoint", endpoint,
            "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random",
            "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
            "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(NUM_AT_ONCE),
            "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--save-result", "--result-dir", WORK, "--result-filename", name,
        ]
    )  # fmt: skip
    result = json.loads((Path(WORK) / name).read_text())
    equal((result["completed"], result["failed"]), (NUM_REQUESTS, 0))
    equal(result["total_output_tokens"], NUM_REQUESTS * OUTPUT_TOKENS)
    print(f"{result['output_throughput']:.1f} output tok/s")


@check
def text() -> None:
    """A run over completions completes, and counts the tokens asked for."""
    bench("openai", "/v1/completions")


@check
def chat() -> None:
    """A run over chats completes, and counts the tokens asked for."""
    bench("openai-chat", "/v1/chat/completions")


if __name__ == "__main__":
    sys.exit(main())
