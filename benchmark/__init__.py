"""Measurements of speed; `python benchmark/rounds.py --help` is the entry."""
