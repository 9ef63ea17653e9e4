"""python -m deploy.k8s_run: builds the images, plays dev-cpu with podman, disturbs it under load.

The result is 0 only if everything was done and no request failed. What was started is removed at
the end, however it ends. --optional is for a place where podman may be missing: then it says so,
and the result is 0 as well.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from os.path import relpath

from deploy.docker import __main__ as docker
from deploy.k8s_run import (
    difference,
    images,
    load,
    machine,
    models,
    overlay,
    pods,
    scenario,
    secret_files,
    trial,
)
from deploy.k8s_run.deadline import Deadline
from deploy.k8s_run.errors import LateError, NotPossibleError, RunError, first
from deploy.k8s_run.podman import Podman
from deploy.k8s_run.stage import Stage

RUNS = docker.ROOT / "run"
PREFIX = "quire-run"
MODEL = "smollm2-135m"
MODELS_VOLUME = "models"
LIMIT_S, OPTIONAL_LIMIT_S = 7200.0, 900.0  # of all but the removal at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is asked of the pods."""

    num_clients: int
    num_jobs: int
    num_tokens: int


REAL = Size(num_clients=8, num_jobs=8, num_tokens=64)
STUBBED = Size(num_clients=16, num_jobs=16, num_tokens=200)
STUB_VARIABLES = {"STUB_STEP_MS": "20"}


def say(text: str) -> None:
    """A line of progress, at once."""
    print(f"[k8s-run] {text}", flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.k8s_run", description=__doc__)
    parser.add_argument("--stub", action="store_true", help="workers of the tests, no model")
    parser.add_argument(
        "--bases",
        choices=(images.PULL, images.BUILD, images.AUTO),
        default=images.AUTO,
        help="base images: pulled, built here, or (auto) built where they can't be pulled",
    )
    parser.add_argument("--no-build", action="store_true", help="take the images of the run before")
    parser.add_argument("--install", action="store_true", help="install podman by apt-get")
    parser.add_argument("--optional", action="store_true", help="not possible is no failure")
    return parser.parse_args(list(argv))


def wanted(stub: bool, bases: images.Bases, cores: int) -> overlay.Wanted:
    """What the run puts on top of dev-cpu."""
    settings = {"QUIRE_DETERMINISTIC": "1", "QUIRE_NUM_THREADS": str(max(1, cores // 2))}
    replaced = {f"quire/{service}": images.own(service) for service in docker.SERVICES}
    if bases.redis != images.REDIS:
        replaced[images.REDIS.rpartition(":")[0]] = bases.redis
    if stub:
        replaced["quire/worker"] = images.STUB
    return overlay.Wanted(
        settings={} if stub else settings,
        images=replaced,
        worker_variables=STUB_VARIABLES if stub else {},
    )


class Run:
    """One run, from the images to the last line."""

    def __init__(
        self, chosen: argparse.Namespace, environ: Mapping[str, str], deadline: Deadline
    ) -> None:
        self.prefix = f"{PREFIX}-{secrets.token_hex(3)}"
        self.folder = RUNS / self.prefix
        self._chosen, self._deadline = chosen, deadline
        self._environ = machine.environ(environ, self.folder)
        self.podman = Podman(self.prefix, self._environ)

    async def try_a_pod(self) -> None:
        """Makes the network. Raises NotPossibleError where pods can't run as these must."""
        try:
            await self.podman.make_network()
            await trial.run(self.podman)
        except (RunError, OSError) as error:
            raise NotPossibleError(f"podman can't run a pod here: {error}") from error

    def build(self) -> images.Bases:
        """All images. Raises NotPossibleError where none can be built, RunError, LateError.

        Once a small build has gone well, one of Quire's that fails is Quire's fault.
        """
        try:
            builder = images.Images(self._environ, self.folder, say, self._deadline)
            bases = builder.bases(self._chosen.bases)
            if not self._chosen.no_build:
                builder.try_a_build(bases.python)
        except (RunError, OSError, subprocess.SubprocessError) as error:
            raise NotPossibleError(f"no image can be built here: {error}") from error
        stub = self._chosen.stub
        services = docker.SERVICES[:-1] if stub else docker.SERVICES
        if not self._chosen.no_build:
            builder.build(services, bases.python)
            if stub:
                builder.build_stub(bases.python)
        tags = [images.own(service) for service in services]
        for line in builder.sizes([*tags, *([images.STUB] if stub else [])]):
            say(line)
        return bases

    async def play(self, bases: images.Bases) -> None:
        """Everything that has pods."""
        chosen = self._chosen
        text, rendered = overlay.rendered(
            wanted(chosen.stub, bases, os.cpu_count() or 1), self.folder / "overlay"
        )
        say("rendered from this kustomization:\n" + text.rstrip())
        made = secret_files.make(overlay.NAMESPACE)
        source = pods.Source(rendered=rendered, prefix=self.prefix, secrets=made.secrets)
        await self._volumes(source)
        size = STUBBED if chosen.stub else REAL
        async with asyncio.TaskGroup() as tasks:
            stage = Stage(self.podman, source, tasks, say)
            steps = scenario.Scenario(stage, say)
            await steps.bring_up()
            await self._ask(stage, steps, made.api_key, size)
            stage.stop_watching()
        if unexplained := difference.unexplained(stage.played):
            raise RunError("differences that no rule allows:\n" + "\n".join(unexplained))

    async def _volumes(self, source: pods.Source) -> None:
        if unknown := difference.unknown_kinds(source.rendered):
            raise RunError(f"nothing is said about playing {', '.join(unknown)}")
        for name in pods.claims(source):
            await self.podman.make_volume(name)
        for volume in pods.secret_volumes(source):
            await self.podman.make_volume(volume.name)
            await self.podman.fill_with_secret(volume)
        with models.folder(self._chosen.stub, self._environ, say) as folder:
            await self.podman.fill_with_folder(source.name(MODELS_VOLUME), folder, MODEL)

    async def _ask(self, stage: Stage, steps: scenario.Scenario, api_key: str, size: Size) -> None:
        _, url = steps.gateway()
        clients = load.Load(url, api_key, MODEL, load.jobs(size.num_jobs, size.num_tokens))
        try:
            say(f"{size.num_jobs} streams from {url}, undisturbed")
            await clients.undisturbed()
            if clients.problems:
                raise RunError("\n".join(["undisturbed requests failed:", *clients.problems]))
            await scenario.under_load(clients, size.num_clients, lambda: steps.disturb(clients))
            await steps.settle()
            await stage.check_restarts()
        finally:
            await clients.close()
        self._report(stage, steps, clients)
        found = [*clients.problems, *stage.problems()]
        if found:
            raise RunError("\n".join(["not as it should be:", *found]))

    def _report(self, stage: Stage, steps: scenario.Scenario, clients: load.Load) -> None:
        say("rendered and played manifests differ in:")
        for line in difference.report(stage.source.rendered, stage.played):
            print(f"  {line}")
        say("what was done under load (longest gap between two tokens of a stream):")
        for step in steps.steps:
            print(
                f"  {step.what}: {step.detail}; {step.took_s:.0f} s, {step.num_answers} answers, "
                f"gap {step.longest_gap_s:.1f} s"
            )
        say(
            f"{clients.num_answers} answers with {clients.num_tokens} tokens, "
            f"{len(clients.problems)} failed; {stage.num_asked()} probes asked, "
            f"{len(stage.problems())} problems"
        )


async def bounded(work: Awaitable[None], deadline: Deadline) -> None:
    """Ends at SIGTERM as at Ctrl-C, and at the deadline."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await deadline.bound(work)


def carry_out(chosen: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Raises RunError, NotPossibleError, LateError, or KeyboardInterrupt."""
    deadline = Deadline(OPTIONAL_LIMIT_S if chosen.optional else LIMIT_S)
    machine.prepare(chosen.install, say, deadline)
    run = Run(chosen, environ, deadline)
    run.folder.mkdir(parents=True, exist_ok=True)
    good = False
    try:
        asyncio.run(bounded(run.try_a_pod(), deadline))
        # Like Ctrl-C, also while nothing waits: the network of the trial stands.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        bases = run.build()
        asyncio.run(bounded(run.play(bases), deadline))
        good = True
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        raise first(group) from group
    finally:
        # A second Ctrl-C would leave behind what this is to remove.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        try:
            if not good:
                with contextlib.suppress(OSError):
                    run.podman.save_logs(run.folder / "logs")
                say(f"what was printed lies in {relpath(run.folder, docker.ROOT)}")
        finally:
            left = run.podman.clean()
        if good:
            shutil.rmtree(run.folder, ignore_errors=True)
    if left:
        raise RunError("could not be removed: " + "; ".join(left))


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The status of the process."""
    chosen = parse(argv)
    begun = time.monotonic()
    try:
        carry_out(chosen, environ)
    except (NotPossibleError, LateError) as error:
        say(f"not run: {error}")
        return 0 if chosen.optional else 1
    except RunError as error:
        say(f"failed after {time.monotonic() - begun:.0f} s: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; everything that was started is removed")
        return 130
    say(f"passed in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
