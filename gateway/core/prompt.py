"""The chat template: messages to prompt text in which only the template writes control tokens.

What a user typed never becomes a control token. Where a message holds the text of a special token
(or an edge of one, that the template could complete), a mark is put inside it before rendering.
Special-token texts that are whole in the rendered prompt are then the template's own; the rest is
encoded as plain text after the marks are removed. Prompts without such texts, nearly all, are
rendered untouched and encoded in one go, exactly as transformers does.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.core.errors import RejectReason, RequestRejected

_MARKS = range(0xE000, 0xE100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of prompt text; special-token texts in it are control tokens only if `control`."""

    text: str
    control: bool


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks training data; here it is its own content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which is no business of a prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A model's compiled template. Raises jinja2.TemplateSyntaxError for a broken one."""

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str],
        special_tokens: Sequence[str],
        now: Callable[[], datetime],
    ) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = env.from_string(source)
        self._variables = dict(variables)
        tokens = sorted((t for t in special_tokens if t), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._heads = frozenset(t[:k] for t in tokens for k in range(1, len(t)))
        self._tails = frozenset(t[k:] for t in tokens for k in range(1, len(t)))
        self._longest = len(tokens[0]) - 1 if tokens else 0

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[Piece]:
        """The prompt, with the opening of the assistant's turn, or open within the last message.

        Raises RequestRejected.
        """
        contents = [m.content for m in messages]
        risky = any(self._is_risky(c) for c in contents)
        mark = end = ""
        if risky or continue_final_message:
            mark, end = _unused_marks(contents)
        if risky:
            contents = [self._defuse(c, mark) for c in contents]
        if continue_final_message:
            contents[-1] += end
        turns = [{"role": m.role, "content": c} for m, c in zip(messages, contents, strict=True)]
        text = self._render_text(turns, add_generation_prompt)
        if continue_final_message:
            # Whatever the template puts behind the last message closes it.
            text, found, _ = text.rpartition(end)
            if not found:
                raise _refused("The model's chat template does not show the last message.")
            text = text.replace(end, "")
        return self._split(text, mark) if risky else [Piece(text=text, control=True)]

    def _render_text(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=turns,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except jinja2.UndefinedError as error:
            raise _refused("The model's chat template can't render these messages.") from error
        except jinja2.TemplateError as error:
            raise _refused(f"The model's chat template says: {str(error)[:200]}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise _refused("The model's chat template can't render these messages.") from error

    def _is_risky(self, content: str) -> bool:
        if self._special is None:
            return False
        return bool(self._special.search(content)) or any(self._edges(content))

    def _edges(self, content: str) -> tuple[int, int]:
        """Lengths of the tail of a special token it begins with, and of the head it ends with."""
        core = content.strip()
        lengths = range(min(self._longest, len(core)), 0, -1)
        begins = next((k for k in lengths if core[:k] in self._tails), 0)
        ends = next((k for k in lengths if core[-k:] in self._heads), 0)
        return begins, ends

    def _defuse(self, content: str, mark: str) -> str:
        """`content` with marks inside special-token texts and at risky edges."""
        assert self._special is not None
        # Overlapping texts need a mark each: begin again one character on.
        parts, at = [], 0
        while found := self._special.search(content, at):
            parts += [content[at : found.start() + 1], mark]
            at = found.start() + 1
        marked = "".join([*parts, content[at:]])
        begins, ends = self._edges(content)
        left = len(marked) - len(marked.lstrip())
        right = len(marked.rstrip())
        head, core, tail = marked[:left], marked[left:right], marked[right:]
        return f"{head}{mark if begins else ''}{core}{mark if ends else ''}{tail}"

    def _split(self, text: str, mark: str) -> list[Piece]:
        """Template's special tokens apart from everything else."""
        assert self._special is not None
        pieces, at = [], 0
        for found in self._special.finditer(text):
            if found.start() > at:
                pieces.append(Piece(text=text[at : found.start()].replace(mark, ""), control=False))
            pieces.append(Piece(text=found.group(), control=True))
            at = found.end()
        if at < len(text):
            pieces.append(Piece(text=text[at:].replace(mark, ""), control=False))
        return pieces


def _unused_marks(contents: Sequence[str]) -> tuple[str, str]:
    free = (m for m in map(chr, _MARKS) if not any(m in content for content in contents))
    unused = list(islice(free, 2))
    if len(unused) < 2:
        raise _refused("The messages use too many private-use characters.")
    return unused[0], unused[1]


def _refused(message: str) -> RequestRejected:
    return RequestRejected(RejectReason.INVALID, message, param="messages")
