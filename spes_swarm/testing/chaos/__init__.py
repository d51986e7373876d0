"""Seeded faults on a swarm of real processes (`scripts/chaos.py`).

Begin with `schedule` (what happens when), then `swarm` (what is done to whom, and what must hold).
"""
