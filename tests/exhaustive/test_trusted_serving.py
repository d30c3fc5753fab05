"""A whole deployment with certificates or with a token serves exact answers with accepted drafts, over Ray and HTTP.

Not part of the default suite: `make test-exhaustive`.
"""

import os
import signal
from pathlib import Path

from tests.certificates import Authority
from tests.integration.serving import Reference, Served, demo_served
from tests.integration.test_serving import assert_nothing_left, complete, eventually

TOKENS = 64
DRAFTING = ("speculation.schedule=lock_step", "draft.resources.background=false")
PROMPTS = ("Tell me of rivers.", "Tell me of trains.", "Tell me of bread.")


def answers(served: Served) -> int:
    """Sends every prompt, compares the answers with non-speculative decoding, and returns the accepted draft tokens."""
    reference = Reference(served.config.model.target)
    accepted = 0
    for prompt in PROMPTS:
        answer = complete(served, prompt, TOKENS)
        reference.assert_greedy(prompt, TOKENS, answer.choices[0].message.content or "")
        accepted += answer.usage.completion_tokens_details.accepted_prediction_tokens or 0
    return accepted


def test_certificates_also_once_they_are_replaced(tmp_path: Path) -> None:
    authority = Authority()
    trust = authority.issue_all(tmp_path)
    with demo_served(*DRAFTING, f"trust.certificates={trust.certificates}") as served:
        assert answers(served) > 0
        authority.issue_all(tmp_path)
        (drafter,) = served.inspect("Drafter")
        os.kill(drafter["pid"], signal.SIGKILL)
        eventually(lambda: answers(served) > 0, "its successor, which has only the new ones, drafts")
        assert_nothing_left(served)


def test_a_token(tmp_path: Path) -> None:
    token = tmp_path / "tokens"
    token.write_text("a-secret-of-this-deployment\n")
    with demo_served(*DRAFTING, f"trust.token_file={token}") as served:
        assert answers(served) > 0
        assert_nothing_left(served)
