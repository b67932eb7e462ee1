"""What MkDocs runs before it builds: the code of the pages imports `docs.figures`, as it does under pytest."""

import sys
from pathlib import Path


def on_startup(*, command: str, dirty: bool) -> None:
    """Not at import: MkDocs puts the path back after loading this file."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
