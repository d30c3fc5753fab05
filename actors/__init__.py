"""The muscle: models, caches, drafting methods, acceptance, and the loops and gRPC servers around them.

Knows nothing of HTTP, text or the session ledger. Importing the package imports no torch.
"""
