"""The mind: config, session ledger, verification and drafting schedulers, pacing, routing, placement.

Pure code with an injected clock. Knows nothing of torch or HTTP, and of Ray in one file (`ray_membership.py`).
"""
