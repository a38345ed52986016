"""Formats of draft checkpoints: what each writes in its config.json, and the weights beside it.

`zlab` and `speculators` read a format, `transformer` what both share; `variants` refuses relatives
of DFlash by name; `weights` knows names and shapes.
"""
