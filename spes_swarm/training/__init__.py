"""Local training steps, and how the live weights change at each commit.

Imports the packages below it and `port`, never `network`: a trainer runs with anything that implements the port.
Start with `trainer`; the life of a round is in `rounds`.
"""
