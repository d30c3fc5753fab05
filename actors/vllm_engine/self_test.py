"""Before it serves, a vLLM target is shown one right and one wrong block; what it says of them must be what it has to.

Attributes that vLLM keeps to itself move between its versions, and what moved need not raise an error. The same session
is decided plainly first, greedy and drawn with noise, and after each block the text has to be the same.
"""

from collections.abc import Callable
from dataclasses import replace

from cluster.errors import EngineError
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Open, Sampling

Step = Callable[[StepPlan], list[Outcome]]
PROMPT_TOKENS = 5
PLAIN_TOKENS = 5
SESSION = "self-test"


def check_engine(step: Step, fed: Callable[[Row], Row | None], vocabulary: int, longest: int) -> None:
    """Raises EngineError if a block of at most `longest` tokens is not decided as the specification has it.

    `fed` is what the engine's memory says of a planned row.
    """
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0)):
        plain = _Trial(step, fed, vocabulary, sampling)
        text = plain.decide([NO_TREE] * PLAIN_TOKENS)
        length = min(longest, PLAIN_TOKENS - 2)
        if not length:
            continue
        right = tuple(text[1 : 1 + length])
        wrong = ((right[0] + 1) % vocabulary, *right[1:])
        for name, tokens, expected in (("right", right, length), ("wrong", wrong, 0)):
            trial = _Trial(step, fed, vocabulary, sampling)
            found = trial.decide([NO_TREE, DraftTree.chain(tokens)])
            if found != text[: 2 + expected]:
                raise EngineError(
                    f"vLLM's self-test failed: after a {name} block of {length} tokens at temperature"
                    f" {sampling.temperature:g} it has {found}, expected {text[: 2 + expected]}; this version of vLLM"
                    " does not do what the adapter was written for"
                )


class _Trial:
    """A session of its own, from the first token to its end."""

    def __init__(self, step: Step, fed: Callable[[Row], Row | None], vocabulary: int, sampling: Sampling) -> None:
        self._step = step
        self._fed = fed
        self._tokens = [token % vocabulary for token in range(1, 1 + PROMPT_TOKENS)]
        self._open = Open(
            session=SESSION,
            attempt=0,
            tokens=tuple(self._tokens),
            prompt_len=PROMPT_TOKENS,
            max_len=PROMPT_TOKENS + 2 * PLAIN_TOKENS,
            stop_ids=(),
            sampling=sampling,
            seed=1,
            choice=0,
            hash_key=0,
            acceptance=Acceptance.COUPLED,
            max_draft_tokens=PLAIN_TOKENS,
        )

    def decide(self, drafts: list[DraftTree]) -> list[int]:
        """What is decided in so many steps, each with its draft."""
        start = 0
        opens: tuple[Open, ...] = (self._open,)
        for draft in drafts:
            known = tuple(self._tokens[start:])
            row = Row(SESSION, known + draft.tokens, start, decide=True, pages=(), draft=draft)
            outcomes = self._step(StepPlan((), opens, (row,)))
            opens = ()
            fed = self._fed(row)
            if fed is None or len(outcomes) != 1 or fed.draft != draft:
                raise EngineError(f"vLLM's self-test failed: it fed {fed}, expected {replace(row)}")
            start = len(self._tokens) + outcomes[0].accepted
            self._tokens += outcomes[0].tokens_of(fed)
        self._step(StepPlan((SESSION,), (), ()))
        return self._tokens[PROMPT_TOKENS:]
