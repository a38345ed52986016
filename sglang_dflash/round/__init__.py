"""One round over a batch: open, propose, verify, accept, commit; kernel by kernel or as one CUDA graph.

Knows tensors, not requests. May use `serving`, `drawing`, `drafter`, `gpu` and what lies below them.
"""
