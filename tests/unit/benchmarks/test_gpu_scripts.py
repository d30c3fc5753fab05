"""Runs the GPU benchmarks on a CPU with a tiny model."""

import torch

from tests.unit.benchmarks.scripts import script

CPU = torch.device("cpu")


def test_engine_steps_are_measured():
    gpu_engine = script("gpu_engine")
    steps, report = gpu_engine.measure("tiny", 20, 2, CPU, 1e9)
    assert [(step.rows, step.tokens_each) for step in steps] == [(1, 1), (8, 1), (32, 1), (1, 5), (8, 5), (32, 5)]
    assert all(step.step_ms > 0 and step.floor_ms > 0 for step in steps)
    assert report.chosen == "gathered"


def test_a_random_pair_has_the_requested_agreement():
    pair = script("random_pair")
    target = pair.random_model(pair.config_of("tiny", 500, 4), CPU)
    found = pair.add_noise(target, 0.7)
    assert abs(found - 0.7) < 0.05
    draft = pair.random_model(pair.config_of("tiny", 500, 1), CPU)
    pair.silence(draft)
    assert pair.agreement(draft) == 1.0, "the draft walks on undisturbed"
