"""Why a planted bug is not seen: by its name in the results."""

WHY: dict[str, str] = {
    "hodiff/calculus/_higher.py:195:19-56 call": "the same: only the size of what is found is looked at",
    "hodiff/verify/_isolated.py:39:19-32 call": "the same: the point is detached already",
}
