"""Checking derivatives against finite differences."""
