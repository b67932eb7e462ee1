"""`python -m hodiff`, which is what the command `hodiff` runs."""

from __future__ import annotations

import sys

from hodiff.cli import main

if __name__ == "__main__":
    sys.exit(main())
