"""How a process of a server begins and ends: garbage collections, a full disk, SIGTERM.

Uses no other room.
"""
