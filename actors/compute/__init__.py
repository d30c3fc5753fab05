"""Building blocks of forwards: the paged KV cache, matrix products, collectives and hidden states.

Start with `kv_cache`, which defines the cache of all layers and `InputRow`, the unit of a step. `linear` contains
matrix products, packed for the processor or in 8 bits. `collectives` contains communication between tensor-parallel
ranks. `hidden_states` captures, encodes and stores the target's hidden states for draft heads.
"""
