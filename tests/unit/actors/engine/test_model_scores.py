"""Compares a target's log probabilities with the same model in transformers."""

import torch

from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from cluster.verification.step import Row, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import Scoring, TokenRules, TokenScore
from tests.unit.actors.tiny_models import MODELS, VOCABULARY, tokens_of, twins
from tests.unit.cluster.samples import an_open

PROMPT = tokens_of(5, 12)
CHUNK = 5
TOP = 3
TOLERANCE = 1e-3
PAGES = (3, 0, 7, 5, 6)
PAGE_SIZE = 4


class Plain:
    """Model without a cache, and our executor with the same weights."""

    def __init__(self) -> None:
        self.model, twin = twins(MODELS["llama"], seed=3)
        self.executor = StepExecutor(ModelRunner(twin, 8, PAGE_SIZE), VOCABULARY)

    @torch.inference_mode()
    def log_probs(self, text: tuple[int, ...]) -> torch.Tensor:
        """Returns log probabilities after each token, (tokens, vocabulary)."""
        return torch.log_softmax(self.model(torch.tensor([text])).logits[0], dim=-1)

    @torch.inference_mode()
    def greedy(self, text: tuple[int, ...], count: int, without: int) -> tuple[int, ...]:
        """Returns the greedy token other than the given one."""
        found: tuple[int, ...] = ()
        for _ in range(count):
            last = self.log_probs((*text, *found))[-1]
            last[without] = -torch.inf
            found = (*found, int(last.argmax()))
        return found

    def check(self, text: tuple[int, ...], begin: int, scores: tuple[TokenScore, ...]) -> None:
        """Compares the scores of the text's tokens from `begin` on."""
        expected = self.log_probs(text)
        assert len(scores) == len(text) - begin
        for at, score in enumerate(scores, begin):
            top = expected[at - 1].topk(TOP)
            assert abs(score.logprob - float(expected[at - 1, text[at]])) < TOLERANCE
            assert score.top_ids == tuple(top.indices.tolist())
            torch.testing.assert_close(torch.tensor(score.top_logprobs), top.values, atol=TOLERANCE, rtol=0)


def test_scores_of_prompt_and_answer_are_those_of_transformers_along_a_tree_and_under_rules():
    """The prompt has two chunks, the second in a row with a tree; scores ignore the request's bias."""
    plain = Plain()
    forbidden = plain.greedy(PROMPT, 1, without=0)[0]
    first, second = plain.greedy(PROMPT, 2, without=forbidden)
    tree = DraftTree(((first + 1) % VOCABULARY, first, (second + 1) % VOCABULARY, second), (-1, -1, 1, 1))
    rules = TokenRules(logit_bias=((forbidden, -100.0),))
    request = an_open("s", tokens=PROMPT, rules=rules, scoring=Scoring(TOP, TOP))
    chunk = Row("s", PROMPT[:CHUNK], 0, decide=False, pages=PAGES)
    assert plain.executor.step(StepPlan((), (request,), (chunk,))) == []
    row = Row("s", (*PROMPT[CHUNK:], *tree.tokens), CHUNK, decide=True, pages=PAGES, draft=tree)
    (outcome,) = plain.executor.step(StepPlan((), (), (row,)))
    assert outcome.path == (1, 3)
    plain.check(PROMPT, 1, outcome.prompt_scores)
    plain.check((*PROMPT, *outcome.tokens_of(row)), len(PROMPT), outcome.scores)
