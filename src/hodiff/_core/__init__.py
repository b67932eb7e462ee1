"""The road that every user's function takes, and what it stands on."""

from hodiff._core import _versions

_versions.check_release()  # before anything that an older release lacks is imported
