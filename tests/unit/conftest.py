"""Unit tests run on the CPU where there is no GPU; Triton kernels in Triton's interpreter."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
