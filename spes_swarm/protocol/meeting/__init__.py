"""How the group of a round forms: a pure machine, which network/round/rendezvous.py drives.

Start with `meeting`, the machine: calls, polls, answers and time go in, calls, polls, answers and one group per round
come out. `view` is what a peer knows of the others at one moment, `gathering` what a leader knows of a round, `attempt`
a peer's way into a group, `outputs` what the machine wants done.
"""
