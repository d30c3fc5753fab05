"""Publishes metrics: mirrored into Ray's metrics, and merged over all processes at `/metrics`.

`aggregate_metrics.py` answers `/metrics` with the families of all replicas, encodes them between processes, and repeats
some under vLLM's names; start there. `serve_replicas.py` collects them through Ray Serve. `ray_mirror.py` copies a
process's families into Ray's metrics, and `gauges.py` makes families of current values.
"""
