"""What a server takes and tells: arguments, requests, limits, the memory budget, metrics.

May use `checkpoint` and `errors`.
"""
