"""python -m deploy.k8s_check: renders every overlay and combination and checks what comes out."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from deploy.k8s_check import (
    external,
    memory_checks,
    monitoring_checks,
    network_checks,
    object_checks,
    pod_checks,
    render,
    schema_checks,
)
from deploy.k8s_check.objects import Rendered

Check = Callable[[Rendered], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    *schema_checks.CHECKS,
    *object_checks.CHECKS,
    *pod_checks.CHECKS,
    *memory_checks.CHECKS,
    *network_checks.CHECKS,
    *monitoring_checks.CHECKS,
)


def together(renderings: Sequence[Rendered]) -> Iterator[Rendered]:
    """A further model beside each overlay of the same namespace that has what it shares."""
    further = next(r for r in renderings if r.name == "overlays/second-model")
    for rendered in renderings:
        if rendered.name.startswith("overlays/") and rendered is not further:
            yield Rendered(
                name=f"{rendered.name} with {further.name}",
                manifests=(*rendered.manifests, *further.manifests),
            )


def names_do_not_clash(renderings: Sequence[Rendered]) -> Iterator[str]:
    """Two models in a namespace: no object twice, no selector that takes the other's pods."""
    for both in together(renderings):
        for check in (object_checks.names_are_unique, object_checks.selectors_take_their_own):
            for problem in check(both):
                yield f"{both.name}: {problem}"


def problems(renderings: Sequence[Rendered]) -> Iterator[str]:
    """All that the checks find, each once, with where it was seen first."""
    seen: set[str] = set()
    for rendered in renderings:
        for check in CHECKS:
            for problem in check(rendered):
                if problem not in seen:
                    seen.add(problem)
                    yield f"{rendered.name}: {problem}"
    yield from names_do_not_clash(renderings)


def main() -> int:
    """Prints what is wrong; 0 if nothing is."""
    started = time.monotonic()
    try:
        renderings = render.render_all()
    except render.RenderError as error:
        print(f"[k8s-check] {error}", file=sys.stderr)
        return 1
    found = list(problems(renderings))
    overlays = [r for r in renderings if r.name.startswith("overlays/")]
    told, missing = external.run_all(overlays, os.environ)
    found += told
    for name in missing:
        print(f"[k8s-check] {name} is not installed, NOT RUN: {external.HOW_TO_GET[name]}")
    for problem in found:
        print(f"[k8s-check] {problem}", file=sys.stderr)
    objects = sum(len(rendered.manifests) for rendered in renderings)
    print(
        f"[k8s-check] {len(renderings)} renderings, {objects} objects, {len(CHECKS)} checks, "
        f"{len(found)} problems, {time.monotonic() - started:.0f} s"
        + (f"; not run: {', '.join(missing)}" if missing else "")
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
