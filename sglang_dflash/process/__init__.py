"""How a process of a server begins and ends: garbage collections, a full disk, SIGTERM, other ranks that end.

Uses no other room.
"""
