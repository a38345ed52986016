"""What the release lacks on a CPU: attention of blocks, pages, seeded draws.

Uses no other room.
"""
