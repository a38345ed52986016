"""What SGLang's scheduler calls: the two workers, KV slots for their rounds, results given to requests.

The top of the house: it may use every other room, and only the release's scheduler uses it.
"""
