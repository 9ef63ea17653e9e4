"""python -m gateway."""

import asyncio

from gateway import settings as gateway_settings
from servicekit import logs, process


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """Reads the settings, then serves."""
    settings = gateway_settings.load(argv, environ)
    logs.configure("gateway", settings.log_level)
    from gateway.app import serve

    return await serve(settings, stop)


if __name__ == "__main__":
    process.run(main)
