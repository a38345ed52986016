"""What makes blocks fast on a GPU: attention inside graphs, fused layers, Triton kernels.

May use `errors` alone: it knows layers and tensors, neither rounds nor requests.
"""
