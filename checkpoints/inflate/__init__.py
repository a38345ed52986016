"""Writes a trained small pair into the shape of a large one, function unchanged: docs/inflated-pairs.md.

What is computed stays that of the small pair; what it costs becomes that of the large one.
"""
