"""`slipstream bench`: the same prompts with and without speculation.

`reports.py` is the entry point. It runs `experiment.py` (batches of concurrent requests, arms interleaved) or
`open_loop.py` (Poisson arrivals at given rates). `measures.py` and `latencies.py` hold the statistics, `tables.py` and
`html_report.py` the output, and `baseline.py` the reference arm, Hugging Face `generate`.
"""
