"""How training goes at one peer: losses that are not finite, held-out loss, routing, and the effect of commits.

Read `loss_watch` first: it judges whether the last commit of the swarm did harm.
"""
