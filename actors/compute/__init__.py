"""Building blocks of forwards: the paged KV cache, matrix products, collectives and host-to-device copies.

`kv_cache.py` defines `FeedRow`, the unit that a step feeds, and the cache of all layers; start there. `linear.py` has
the matrix products, packed or in 8 bits, and `collectives.py` the communication between tensor-parallel ranks.
`state_cache.py` and `state_codec.py` keep and encode the target's hidden states.
"""
