"""The command line: `hodiff` and `python -m hodiff`. One file per command; nothing else imports it."""
