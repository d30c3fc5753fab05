"""Sizes of the target pool and the draft pool: pure, from the replicas' reports.

Input: `TargetReport` and `DraftReport` metrics, the pools' current sizes and bounds, and the settings that target
replicas report. Output: a size for each pool, with the reason for it.

Start with `serve_policy.py`, which Ray Serve calls. `pools.py` combines the needs (`demand.py`) with delays against
noise (`stabilization_window.py`). Serve's controller pickles the exported names by value, with this whole folder, and
calls them ten times a second. So no module here imports project code from other folders, and nothing here waits.
"""

from cluster.autoscaling.serve_policy import PoolAlone, PoolsPolicy

__all__ = ["PoolAlone", "PoolsPolicy"]
