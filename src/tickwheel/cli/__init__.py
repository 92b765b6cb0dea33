"""The command line: the other edge, equally thin. Each command is loaded when it is called."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with the code that `exits` gives."""
    try:
        from tickwheel.cli.root import root  # noqa: PLC0415 - so that what is missing can be said
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        sys.exit(f"error: {missing}; for the command line: pip install 'tickwheel[cli]'")
    root.main(prog_name="tickwheel")
