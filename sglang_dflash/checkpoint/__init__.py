"""Draft checkpoints on disk: formats, checks, and a drafter given as the model.

May use `errors` alone.
"""
