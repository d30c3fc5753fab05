"""Publication of metrics: mirrored into Ray's metrics, and merged over all processes at `/metrics`.

`aggregate_metrics.py` answers `/metrics` with the families of all replicas; start there. `serve_replicas.py` collects
them, and `packed_families.py` encodes them on the way. `ray_mirror.py` copies a process's families into Ray's metrics,
`gauges.py` makes current levels, and `vllm_names.py` repeats families under vLLM's names.
"""
