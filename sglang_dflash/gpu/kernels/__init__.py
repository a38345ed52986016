"""Triton kernels, each beside the PyTorch code that it must equal.

Each is here because a profile of a round showed launches that need not exist; on a CPU, and in
whatever a kernel does not cover, the PyTorch code runs.
"""
