"""Clients that stream while pods come and go: the openai SDK, without its retries.

Each client asks one request after the other until it is told to stop. An answer is whole when it
ends exactly once, with exactly the tokens asked for; where the undisturbed answer is known, they
must be the same tokens.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import openai

ANSWER_S = 600.0
CONNECT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: greedy, of exactly that length."""

    prompt: str
    num_tokens: int
    seed: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """What has come of one request; grows while it streams."""

    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usages: list[int] = field(default_factory=list)
    error: str = ""
    ended: bool = False
    longest_gap_s: float = 0.0

    def problem(self, job: Job, expected: Sequence[int] | None) -> str:
        """Why it is not the whole answer; empty if it is."""
        if self.error:
            return f"{self.error}, after {len(self.token_ids)} of {job.num_tokens} tokens"
        if self.finish_reasons != ["length"]:
            return f"finish reasons {self.finish_reasons}, expected one 'length'"
        if self.usages != [job.num_tokens] or len(self.token_ids) != job.num_tokens:
            return (
                f"{len(self.token_ids)} token ids came, the answer counts {self.usages}, "
                f"asked for {job.num_tokens}"
            )
        if expected is not None and self.token_ids != list(expected):
            pairs = enumerate(zip(self.token_ids, expected, strict=True))
            at = next(i for i, (got, wanted) in pairs if got != wanted)
            return f"token {at} differs from the undisturbed answer's"
        return ""


def jobs(count: int, num_tokens: int) -> list[Job]:
    """Of a few lengths, so that they do not all end at once."""
    words = ("red", "green", "blue", "river", "mountain", "window", "number", "garden")
    return [
        Job(
            prompt=f"Question {i}: tell a story of a {words[i % len(words)]} "
            + " and a ".join(words[: 1 + i % len(words)]),
            num_tokens=num_tokens + 8 * (i % 5),
            seed=1_000 + i,
        )
        for i in range(count)
    ]


class Load:
    """The clients of one gateway."""

    def __init__(self, base_url: str, api_key: str, model: str, work: Sequence[Job]) -> None:
        self.work = list(work)
        self.problems: list[str] = []
        self.num_answers = 0
        self.num_tokens = 0
        self.longest_gap_s = 0.0
        self._sdk = openai.AsyncOpenAI(
            base_url=f"{base_url}/v1",
            api_key=api_key,
            max_retries=0,
            timeout=openai.Timeout(ANSWER_S, connect=CONNECT_S),
        )
        self._model = model
        self._expected: list[list[int]] | None = None
        self._open: dict[int, Answer] = {}
        self._stopped = False

    async def undisturbed(self) -> None:
        """Asks every request once, all at the same time; what comes is what is expected later."""
        answers = [Answer() for _ in self.work]
        async with asyncio.TaskGroup() as group:
            for job, answer in zip(self.work, answers, strict=True):
                group.create_task(self._ask(job, answer))
        for i, (job, answer) in enumerate(zip(self.work, answers, strict=True)):
            self._count(i, answer, answer.problem(job, None))
        self._expected = [answer.token_ids for answer in answers]

    async def client(self, number: int) -> None:
        """Until `stop`; begins where no other client does."""
        at = number
        while not self._stopped:
            job = self.work[at % len(self.work)]
            answer = self._open[number] = Answer()
            await self._ask(job, answer)
            expected = None if self._expected is None else self._expected[at % len(self.work)]
            self._count(at % len(self.work), answer, answer.problem(job, expected))
            at += 1
        self._open.pop(number, None)

    def stop(self) -> None:
        """Each client ends with the answer that it is reading."""
        self._stopped = True

    def num_streaming(self, least: int) -> int:
        """Streams that have had so many tokens and go on."""
        return sum(
            len(answer.token_ids) >= least and not answer.ended for answer in self._open.values()
        )

    async def close(self) -> None:
        """The connections."""
        await self._sdk.close()

    def _count(self, index: int, answer: Answer, problem: str) -> None:
        self.num_answers += 1
        self.num_tokens += len(answer.token_ids)
        self.longest_gap_s = max(self.longest_gap_s, answer.longest_gap_s)
        if problem:
            self.problems.append(f"request {index}: {problem}")

    async def _ask(self, job: Job, answer: Answer) -> None:
        last_s = time.monotonic()
        try:
            stream = await self._sdk.completions.create(
                model=self._model,
                prompt=job.prompt,
                max_tokens=job.num_tokens,
                temperature=0,
                seed=job.seed,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            async for event in stream:
                for choice in event.choices:
                    now_s = time.monotonic()
                    if answer.token_ids:
                        answer.longest_gap_s = max(answer.longest_gap_s, now_s - last_s)
                    last_s = now_s
                    answer.token_ids += (choice.model_extra or {}).get("token_ids") or []
                    if choice.finish_reason:
                        answer.finish_reasons.append(choice.finish_reason)
                if event.usage is not None:
                    answer.usages.append(event.usage.completion_tokens)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            answer.ended = True
