"""llm, the command and the library, with entries in its file of OpenAI-compatible models."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import API_KEY, HAS_KEYS, MODEL, PROMPTS, QUESTION, V1, WORK, check, equal, main, raises

USER = Path(WORK) / "llm"
USER.mkdir(parents=True, exist_ok=True)
os.environ["LLM_USER_PATH"] = str(USER)
ENTRIES = [
    {"model_id": "quire", "model_name": MODEL, "api_base": V1, "api_key_name": "quire"},
    {"model_id": "quire-text", "model_name": MODEL, "api_base": V1, "api_key_name": "quire"}
    | {"completion": True},
    {"model_id": "stranger", "model_name": MODEL, "api_base": V1, "api_key_name": "wrong"},
]
# YAML reads JSON.
(USER / "extra-openai-models.yaml").write_text(json.dumps(ENTRIES))
(USER / "keys.json").write_text(json.dumps({"quire": API_KEY, "wrong": "wrong"}))

import llm  # noqa: E402  # reads its folder when it is imported

OPTIONS = {"temperature": 0, "max_tokens": 8}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, in this environment."""
    argv = [sys.executable, "-m", "llm", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@check
def cli() -> None:
    """The command answers, streamed and whole, with equal texts."""
    options = ["-o", "temperature", "0", "-o", "max_tokens", "8"]
    streamed = command("-m", "quire", QUESTION, *options)
    equal(streamed.returncode, 0)
    assert "Paris" in streamed.stdout, streamed
    equal(command("-m", "quire", "--no-stream", QUESTION, *options).stdout, streamed.stdout)
    logged = json.loads(command("logs", "--json", "-n", "1").stdout)[0]
    assert logged["output_tokens"] > 0, logged


@check
def library() -> None:
    """The library streams, counts tokens and passes options on."""
    model = llm.get_model("quire")
    answer = model.prompt(QUESTION, **OPTIONS)
    pieces = list(answer)
    assert len(pieces) > 1
    whole = model.prompt(QUESTION, stream=False, **OPTIONS)
    equal("".join(pieces), whole.text())
    equal(answer.usage().output, whole.usage().output)
    stop = whole.text()[2:4]
    equal(model.prompt(QUESTION, stop=stop, **OPTIONS).text(), whole.text()[:2])
    hot = {"temperature": 1.5, "max_tokens": 8, "seed": 7}
    equal(*(model.prompt(QUESTION, **hot).text() for _ in range(2)))


@check
def conversation() -> None:
    """A conversation sends its earlier turns, and a system prompt."""
    talk = llm.get_model("quire").conversation()
    first = talk.prompt(QUESTION, system="Be brief.", **OPTIONS)
    first.text()
    second = talk.prompt("And of Italy?", **OPTIONS)
    second.text()
    assert second.usage().input > first.usage().input


@check
def completions() -> None:
    """Completions run with log probabilities."""
    answer = llm.get_model("quire-text").prompt(PROMPTS[0], logprobs=2, **OPTIONS)
    assert "Paris" in answer.text()
    assert answer.response_json["logprobs"]


@check
def errors() -> None:
    """What the gateway refuses is shown with its reason."""
    wrong = command("-m", "quire", QUESTION, "-o", "max_tokens", "100000")
    equal(wrong.returncode, 1)
    assert "max_tokens" in wrong.stderr, wrong
    if HAS_KEYS:
        stranger = llm.get_model("stranger")
        error = raises(Exception, lambda: stranger.prompt(QUESTION, **OPTIONS).text())
        assert "API key" in str(error), error


if __name__ == "__main__":
    sys.exit(main())
