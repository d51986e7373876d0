"""Chaos experiments, in the manner of torchft's failure injector; `scripts/chaos.py` is the command.

`schedule` draws the faults and `report` adds up what they cost; both are pure. `peer` follows one process, `swarm`
does the faults to real ones.
"""
