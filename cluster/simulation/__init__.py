"""The whole system under a virtual clock: the real books, with models, processes and network replaced by their costs.

Knows nothing of torch, gRPC or Ray.
"""
