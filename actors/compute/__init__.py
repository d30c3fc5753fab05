"""Building blocks of forwards: the paged KV cache, matrix products, collectives and hidden states.

`kv_cache` defines `InputRow`, the unit that a step feeds, and the cache of all layers; start there. `linear` has matrix
products, packed for the processor or in 8 bits, and `collectives` has the communication between tensor-parallel ranks.
`hidden_states` captures, encodes and stores the target's hidden states for draft heads.
"""
