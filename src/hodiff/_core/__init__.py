"""The road that every user's function takes, and what it stands on."""
