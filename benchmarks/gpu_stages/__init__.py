"""Stages of `gpu_all.py`, one module each.

A stage defines `run(setting, emit)`, which passes each result to `emit` as soon as it is measured, and
`summary(results)`, one line for the report. Results are frozen dataclasses. With `setting.is_tiny`, the same code runs
on a CPU with small shapes, `CallCapture` and `PaddedSdpa`.
"""
