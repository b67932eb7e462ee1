"""The road that every user's function takes, and what it stands on."""

from hodiff._core import _needed

_needed.check_release()  # before anything is imported that this release may lack
