"""What a measurement runs against: a running gateway, or a model for a stack of its own."""

import argparse
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.client import Client
from benchmarks.stack import StackError, fetch


def setting(pair: str) -> str:
    """The type of an argument `--set QUIRE_NAME=VALUE`: the pair as it is."""
    name, equals, _ = pair.partition("=")
    if not equals or not name.startswith("QUIRE_"):
        raise argparse.ArgumentTypeError(f"{pair}: must be QUIRE_NAME=VALUE")
    return pair


def running(base_url: str) -> tuple[Client, str]:
    """The client and the served model's name of a running gateway. Raises StackError."""
    parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
    if parts.scheme != "http" or parts.hostname is None:
        raise StackError(f"--base-url {base_url}: must be http://HOST:PORT")
    client = Client(host=parts.hostname, port=parts.port or 80)
    status, text = fetch(f"http://{client.host}:{client.port}/v1/models")
    if status != 200:
        raise StackError(f"{base_url}/v1/models answered {status}: {text[:200]}")
    return client, str(json.loads(text)["data"][0]["id"])


def model_folder(model: str) -> str:
    """The folder of `model`, or of the launcher's default one, converted on first use."""
    from deploy.local import model as model_cache
    from deploy.local import options

    chosen = options.read(os.environ)
    return str(Path(model_cache.ensure(model or chosen.model, chosen.cache_dir)))
