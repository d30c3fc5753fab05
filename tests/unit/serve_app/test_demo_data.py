"""Tests the demo's support requests and replay examples."""

import json

import pytest

from actors.learning.conversations import read_examples
from serve_app.demo_data import FOLDER, REPLAY
from serve_app.demo_data.support import support_requests


def test_support_requests_differ_and_follow_the_seed() -> None:
    requests = support_requests(360, seed=1)
    assert len(set(requests)) == 360
    assert requests == support_requests(360, seed=1)
    assert requests[:100] != support_requests(100, seed=2)
    assert len(set(support_requests(2048))) == 2048
    with pytest.raises(ValueError, match="2048 support requests"):
        support_requests(2049)


def test_replay_examples_are_the_drafts_tokens() -> None:
    vocabulary = json.loads((FOLDER / "smollm2_draft" / "config.json").read_text())["vocab_size"]
    examples = read_examples(REPLAY, None, ())
    assert len({example.prompt for example in examples}) == 300
    assert sum(len(example.answer) for example in examples) > 20_000
    assert all(0 <= token < vocabulary for each in examples for token in (*each.prompt, *each.answer))
