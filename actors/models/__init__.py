"""Checkpoints and decoders: loading, sharding, and the forward from a batch to logits.

`checkpoint.load` loads one rank's share of a checkpoint. `config_reader`, `weights` and `reference_check` refuse
checkpoints that cannot be served exactly: unknown or broken configurations, tensors that do not match the model one to
one, and classes whose logits over pages, blocks and trees differ from transformers'. `sharding` splits layers over
ranks by transformers' own plan. `decoder` runs any model in transformers' code, and Llama-like models in fewer,
larger operations. `recurrent_layers` and `own_attention` adapt layers that do not use transformers' interface to
attention. To make another architecture fast, extend `decoder`.
"""
