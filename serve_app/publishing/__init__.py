"""Publishes metrics: mirrors them into Ray's metrics, and merges those of all processes at `/metrics`.

Start with `aggregate_metrics.py`. It serves `/metrics` with the metric families of all replicas, encodes families for
transfer between processes, and repeats some under vLLM's names. `serve_replicas.py` collects families through Ray
Serve. `ray_mirror.py` copies a process's families into Ray's metrics, and `gauges.py` builds families of current
values.
"""
