"""guidellm over both interfaces, streamed."""

import json
import sys
from pathlib import Path

from checks import API_KEY, BASE_URL, MODEL, TOKENIZER, WORK, check, equal, main
from load import NUM_AT_ONCE, NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS, run_tool, tool


def run(route: str) -> None:
    """A run against one route; every request must complete with the tokens asked for."""
    report = Path(WORK) / "report.json"
    backend = f"kind=openai_http,target={BASE_URL},model={MODEL},request_format={route}"
    run_tool(
        [
            tool("guidellm"), "run", "--backend", f"{backend},api_key={API_KEY}",
            "--profile", f"kind=concurrent,streams={NUM_AT_ONCE}",
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data",
            f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "--output", f"kind=json,path={report}", "--disable-progress",
        ]
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    equal((len(requests["successful"]), len(requests["errored"])), (NUM_REQUESTS, 0))
    tokens = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
    equal(tokens, {OUTPUT_TOKENS})


@check
def text() -> None:
    """A run over completions completes, and counts the tokens asked for."""
    run("/v1/completions")


@check
def chat() -> None:
    """A run over chats completes, and counts the tokens asked for."""
    run("/v1/chat/completions")


if __name__ == "__main__":
    sys.exit(main())
