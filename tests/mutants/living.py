"""Why a planted bug is not seen: by its name in the results."""

WHY: dict[str, str] = {}
