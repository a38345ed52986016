"""Shows whether a speculative server answers as plain decoding does; `docs/losslessness.md`.

`greedy` follows both servers token by token and weighs every divergence; `sampling` draws many runs
of both and tests with `permutation` whether they come from one distribution. `faults` holds the
negative controls, servers that must fail, and `simulation` says what the test can see.
"""
