"""The model that a run serves, as a folder of this machine that fills the volume `models`."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.k8s_run.errors import NotPossibleError
from deploy.local import model, options

Say = Callable[[str], None]


@contextmanager
def folder(stub: bool, environ: Mapping[str, str], say: Say) -> Iterator[Path]:
    """The real model of the overlay, or what a gateway needs beside a stub worker."""
    if stub:
        # Only here: what ships needs no tests.
        from tests.e2e.models import write_stub_model

        with tempfile.TemporaryDirectory() as scratch:
            yield write_stub_model(Path(scratch) / "model")
        return
    try:
        yield model.ensure(model.SMOLLM2, options.read(environ).cache_dir, say)
    except model.ModelError as error:
        raise NotPossibleError(str(error)) from error
