"""Local training steps, and how the live weights change at each commit.

Imports the packages below it and `port`, never `network`: a trainer runs with anything that implements the port.
Begin with `trainer`; `pace` decides when a round is due.
"""
