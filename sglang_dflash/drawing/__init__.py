"""How the token of each row is chosen when more is asked than the likeliest one.

Samplers, penalties, grammars, NaN. May use `errors` alone.
"""
