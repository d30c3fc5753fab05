"""How many replicas each pool should have: pure, from what replicas report of themselves.

Serve's controller pickles what is named here by value, with all of this folder, and calls it ten times a second. So
nothing here imports anything of ours from outside, and nothing waits.
"""

from cluster.autoscaling.serve_policy import PoolAlone, PoolsPolicy

__all__ = ["PoolAlone", "PoolsPolicy"]
