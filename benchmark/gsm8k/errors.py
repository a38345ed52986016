"""What keeps a sweep from being made."""

from __future__ import annotations


class CannotSweep(Exception):
    """One sentence for the user: what is wrong, which value, what to do."""
