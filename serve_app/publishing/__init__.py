"""Publishes metrics: mirrors them into Ray's metrics, and merges those of all processes at `/metrics`.

Start with `aggregate_metrics.py`, which answers `/metrics` with the families of all replicas, encodes them between
processes, and repeats some under vLLM's names. `serve_replicas.py` collects families through Ray Serve. `ray_mirror.py`
copies a process's families into Ray's metrics, and `gauges.py` builds families of current values.
"""
