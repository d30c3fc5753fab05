"""Building blocks of forwards: the paged KV cache, matrix products, collectives and states.

Start with `input_row`, the unit of a step, and `kv_cache`, the cache of all layers. `recurrent_states` stores states
of recurrent layers in its pages. `linear` contains
matrix products, packed for the processor or in 8 bits. `collectives` contains communication between tensor-parallel
ranks. `hidden_states` captures, encodes and stores the target's hidden states for draft heads.
"""
