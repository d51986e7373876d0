"""Which peer trains which expert: adoption when a holder dies, rebalancing and rotation.

Start with `reassignment.reassign`: what each peer holds after a commit.
"""
