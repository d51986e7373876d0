"""Checks of the machine that forms the group of a round (spes_swarm/protocol/meeting) on a virtual clock.

- `parts`      statements and groups without signatures
- `world`      a swarm of machines, with faults
- `liars`      hostile members
- `walks`      random walks of such a swarm, and what must hold
- `search`     all interleavings of one round of two or three peers with a few faults
- `mutations`  the machine without one of its statements: is that noticed?

`python -m scripts.model_check` is their command line.
"""
