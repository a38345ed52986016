"""A bounded random mix of requests against a running server, and a report of what went wrong."""
