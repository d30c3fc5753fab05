"""Self-test of a vLLM target before serving: verifies one correct and one wrong block with known results.

vLLM's private attributes change between versions, possibly without an error. The test first decodes a session without
drafts, both greedy and sampled. Decoding with each block must yield the same text.
"""

from collections.abc import Callable
from functools import partial

from cluster.errors import EngineError
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import GREEDY, Open, Sampling

Step = Callable[[StepPlan], list[Outcome]]
PROMPT_TOKENS = 5
PLAIN_TOKENS = 5
STARTS = (1, 11, 23, 37)  # first token of each prompt
SESSION = "self-test"


def check_engine(step: Step, fed: Callable[[Row], Row | None], vocabulary: int, longest: int) -> None:
    """Raises EngineError if blocks of at most `longest` tokens are decided wrongly.

    `fed` returns the engine's record of a planned row. In 16 bits, two logits may nearly tie, so that a block rounds
    differently from a single token. Therefore, one passing prompt is enough; a real fault fails all of them.
    """
    for sampling in (GREEDY, Sampling()):
        faults = []
        for start in STARTS:
            fault = _fault_of(partial(_Trial, step, fed, vocabulary, sampling, start), longest)
            if not fault:
                break
            faults.append(fault)
        else:
            raise EngineError(
                f"vLLM's self-test failed at temperature {sampling.temperature:g}: {faults[0]}; install the"
                " extra [vllm], or set target.engine slipstream"
            )


def _fault_of(trial: Callable[[], "_Trial"], longest: int) -> str:
    """Returns the first fault in deciding a correct and a wrong block; empty if there is none."""
    plain = trial()
    text, fault = plain.decide([NO_TREE] * PLAIN_TOKENS)
    length = min(longest, PLAIN_TOKENS - 2)
    if fault or not length:
        return fault
    right = tuple(text[1 : 1 + length])
    wrong = ((right[0] + 1) % plain.vocabulary, *right[1:])
    for name, tokens, expected in (("right", right, length), ("wrong", wrong, 0)):
        committed, fault = trial().decide([NO_TREE, DraftTree.chain(tokens)])
        if fault:
            return fault
        if committed != text[: 2 + expected]:
            return f"after a {name} block of {length} tokens, the text is {committed}, expected {text[: 2 + expected]}"
    return ""


class _Trial:
    """Runs one session from start to end."""

    def __init__(
        self, step: Step, fed: Callable[[Row], Row | None], vocabulary: int, sampling: Sampling, start: int
    ) -> None:
        self.vocabulary = vocabulary
        self._step = step
        self._fed = fed
        self._tokens = [token % vocabulary for token in range(start, start + PROMPT_TOKENS)]
        max_len = PROMPT_TOKENS + 2 * PLAIN_TOKENS
        self._open = Open.measured(SESSION, tuple(self._tokens), max_len, PLAIN_TOKENS, sampling)

    def decide(self, drafts: list[DraftTree]) -> tuple[list[int], str]:
        """Runs one step per draft. Returns the committed tokens and a description of the first wrongly fed row."""
        start = 0
        fault = ""
        opens: tuple[Open, ...] = (self._open,)
        for draft in drafts:
            committed = tuple(self._tokens[start:])
            row = Row(SESSION, committed + draft.tokens, start, decide=True, pages=(), draft=draft)
            outcomes = self._step(StepPlan((), opens, (row,)))
            opens = ()
            fed = self._fed(row)
            if fed is None or len(outcomes) != 1 or fed.draft != draft:
                fault = f"it fed {fed}, expected {row}"
                break
            start = len(self._tokens) + outcomes[0].accepted
            self._tokens += outcomes[0].tokens_of(fed)
        self._step(StepPlan((SESSION,), (), ()))
        return self._tokens[PROMPT_TOKENS:], fault
