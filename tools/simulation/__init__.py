"""The whole system under a virtual clock: the real schedulers, with costs in the place of models and network.

Knows nothing of torch, gRPC or Ray.
"""
