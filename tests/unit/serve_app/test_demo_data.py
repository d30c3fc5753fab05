"""Tests the demo's requests from templates and replay examples."""

import json
from collections.abc import Callable

import pytest

from actors.learning.conversations import read_examples
from serve_app.demo_data import FOLDER, REPLAY
from serve_app.demo_data.sql import sql_requests
from serve_app.demo_data.support import support_requests


@pytest.mark.parametrize(("requests_of", "most"), [(support_requests, 2048), (sql_requests, 1536)])
def test_requests_differ_and_follow_the_seed(requests_of: Callable[..., list[str]], most: int) -> None:
    requests = requests_of(360, seed=1)
    assert len(set(requests)) == 360
    assert requests == requests_of(360, seed=1)
    assert requests[:100] != requests_of(100, seed=2)
    assert len(set(requests_of(most))) == most
    with pytest.raises(ValueError, match=f"at most {most}"):
        requests_of(most + 1)


def test_replay_examples_are_the_drafts_tokens() -> None:
    vocabulary = json.loads((FOLDER / "smollm2_draft" / "config.json").read_text())["vocab_size"]
    examples = read_examples(REPLAY, None, ())
    assert len({example.prompt for example in examples}) == 300
    assert sum(len(example.answer) for example in examples) > 20_000
    assert all(0 <= token < vocabulary for each in examples for token in (*each.prompt, *each.answer))
