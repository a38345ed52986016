"""The draft model: its layers, its vocabulary, its context K/V, and how it is loaded.

May use `gpu`, `checkpoint` and what lies below them.
"""
