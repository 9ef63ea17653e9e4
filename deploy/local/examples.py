"""The lines that the launcher prints when the stack is ready; each works as printed.

They run from the repository's root, with the environment that the set-up made. With API keys they
take one from KEY_VARIABLE, which OpenAI's own clients read as well.
"""

import json
import shlex
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France?"
MAX_TOKENS = 32
KEY_VARIABLE = "OPENAI_API_KEY"


def has_chat_template(folder: Path) -> bool:
    """Whether the model can be asked through the chat endpoint."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False


def _body(model: str, chat: bool) -> dict[str, Any]:
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": QUESTION}
    )
    rest = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    return {"model": model, **asked, **rest}


def curl(url: str, model: str, chat: bool, keyed: bool = False) -> str:
    """Streams with curl."""
    path = "chat/completions" if chat else "completions"
    data = shlex.quote(json.dumps(_body(model, chat)))
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    return f"curl -sN {url}/v1/{path} -H 'Content-Type: application/json'{key} -d {data}"


def one_liner(url: str, model: str, chat: bool, keyed: bool = False) -> str:
    """Streams with Python's standard library."""
    path = "chat/completions" if chat else "completions"
    text = '["delta"].get("content")' if chat else '["text"]'
    body = f'rb"""{json.dumps(_body(model, chat))}"""'
    key = f', "Authorization": "Bearer " + os.environ["{KEY_VARIABLE}"]' if keyed else ""
    code = (
        f"import json, {'os, ' if keyed else ''}urllib.request as u; "
        f'q = u.Request("{url}/v1/{path}", {body}, '
        f'{{"Content-Type": "application/json"{key}}}); '
        f'[print(json.loads(line[6:])["choices"][0]{text} or "", end="", flush=True) '
        'for line in u.urlopen(q) if line.startswith(b"data: {")]; print()'
    )
    return f".venv/bin/python -c {shlex.quote(code)}"


def openai_sdk(url: str, model: str, chat: bool, keyed: bool = False) -> str:
    """Streams with the openai package."""
    body = _body(model, chat)
    key = "" if keyed else ', api_key="none"'
    call = "chat.completions" if chat else "completions"
    text = "choice.delta.content" if chat else "choice.text"
    arguments = "".join(f"    {name}={value!r},\n" for name, value in body.items())
    return (
        ".venv/bin/python - <<'EOF'\n"
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{url}/v1"{key})\n'
        f"stream = client.{call}.create(\n{arguments})\n"
        "for chunk in stream:\n"
        "    for choice in chunk.choices:\n"
        f'        print({text} or "", end="", flush=True)\n'
        "print()\n"
        "EOF"
    )


def text(url: str, model: str, chat: bool, keyed: bool = False) -> str:
    """All three, each under a line that says what it is."""
    parts = (
        ("curl:", curl(url, model, chat, keyed)),
        ("Python, nothing but the standard library:", one_liner(url, model, chat, keyed)),
        ("the openai package:", openai_sdk(url, model, chat, keyed)),
    )
    return "\n\n".join(f"# {title}\n{line}" for title, line in parts)
