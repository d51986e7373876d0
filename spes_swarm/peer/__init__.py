"""One session of a peer in a run: find the run, fetch its reference, claim experts, train, leave.

Imports everything but `monitor`, `convert` and `testing`. Start with `session`.
"""
