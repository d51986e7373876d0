"""The rounds of the swarm as one peer sees them: when they are due, their life, and what follows a commit.

Start with `life`.
"""
