"""Runs a module with a folder of packages last on the path: what the machine has goes first.

PYTHONPATH can't say that: its folders stand before the standard library and the machine's packages.
"""

import runpy
import sys


def main(argv: list[str]) -> None:
    """Folder ("" for none), module, and the module's own arguments."""
    site, module, *rest = argv
    if site:
        sys.path.append(site)
    sys.argv = [module, *rest]
    # As the main module, so that processes that it spawns find its functions.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
