"""What keeps the comparison from being made."""

from __future__ import annotations


class CannotCompare(Exception):
    """One sentence for the user: what is wrong, which value, what to do."""
