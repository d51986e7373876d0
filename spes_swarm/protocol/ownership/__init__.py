"""Which peer trains which expert: adoption when a holder dies, rebalancing, rotation, and the moments handed over.

Start with `reassignment.reassign`: what each peer holds after a commit.
"""
