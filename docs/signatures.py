"""What the reference shows of a signature: nothing that only the code knows."""

from typing import Any

import griffe


class Signatures(griffe.Extension):
    """A required argument whose absence gets an error with words has a default in the code, none in the reference."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Takes such defaults away."""
        for parameter in func.parameters:
            if str(parameter.default).rpartition(".")[2] == "MISSING":
                parameter.default = None
