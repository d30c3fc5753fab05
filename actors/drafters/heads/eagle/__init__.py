"""EAGLE heads of all generations, in every layout in which they are published.

`eagle_names.py` maps tensor names of all layouts to one set, `eagle_resolution.py` derives the `EagleConfig`
(`eagle_config.py`, where to start) and refuses what does not fit, and `eagle_weights.py` places the tensors.
`eagle_decoder.py` is the forward and `eagle_runner.py` runs it over a paged cache. `eagle_layer_ids.py` interprets
which hidden states of the target a head reads. MTP modules are run by the same decoder.
"""
