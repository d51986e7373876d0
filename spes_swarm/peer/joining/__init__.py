"""Joining a run: from nothing to a trainer that is ready. Each step takes the frozen values of earlier ones.

Start with `join`, which has the steps in order; `context` is what all of them share.
"""
