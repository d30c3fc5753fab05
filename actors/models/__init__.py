"""Checkpoints and decoders: loading, sharding, and the forward from a batch to logits.

`checkpoint.load` turns a folder and a rank into a model. `config_reader`, `weights` and `reference_check` refuse what
cannot be served exactly: unknown or broken configurations, tensors that do not match the model one to one, and classes
whose logits differ from transformers' when served in pages, blocks and trees. `sharding` splits layers over ranks by
transformers' own plan. `decoder` runs any model through transformers' code, and models of the Llama kind through fewer,
larger operations; extend it there to make another architecture fast.
"""
