"""The command line, a thin edge like `web`. A command is imported when it is called."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line, and exit with a code of `exit_codes`."""
    try:
        from tickwheel.cli.root import root  # noqa: PLC0415 - to report a missing package
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        sys.exit(f"error: {missing}; the command line needs: pip install 'tickwheel[cli]'")
    root.main(prog_name="tickwheel")
