"""Parts of lossless worlds: the setting of an experiment, and the real components it configures."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from actors.attention.batch import Interrupted, never
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import MaskTokens
from actors.drafters.translation.noise import TranslatedNoise
from actors.engine.executor import StepExecutor
from actors.grammars import GrammarCompiler
from actors.models.decoder import ForwardOutput
from cluster.costs import ForwardCost
from cluster.drafting.hidden_state_receiver import StateBounds
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.drafting.translated_method import TranslatedMethod
from cluster.drafting.translation import TranslatedText, Translator
from cluster.page_allocator import PageCopy
from cluster.reference_loop import lock_step
from cluster.routing.ledger import CommittedTokens, Generation, Session
from cluster.speculation.controller import Adaptive, DraftingDecision, ExpectedBlock, LockStep, PacingPolicy
from cluster.speculation.estimators import DraftValue, Load
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from protos.messages import NO_RULES, Acceptance, Block, Message, Sampling, TokenRules
from tests.lossless.recurrent import RecurrentRunner
from tests.lossless.states import LAYOUT, RememberingRunner
from tests.toys import ToyRunner, a_generation, toy_draft_model

PAGE_SIZE = 2
STEP_S = 0.010  # duration of a target step
EOS = 0
LATER_S = 3600.0  # after all timeouts

Schedule = Callable[[Message, random.Random], list[float]]
"""Delays after which a message between drafter and target arrives: none when it is lost, two when it is doubled."""


@dataclass(frozen=True)
class Setting:
    """Setting of an experiment: models, acceptance rule and schedule."""

    target_logits: Tensor  # (vocabulary, vocabulary)
    draft_logits: Tensor
    acceptance: Acceptance
    schedule: Schedule
    draft_tokens: int = 2
    new_tokens: int = 3
    sampling: Sampling = Sampling()
    prompt: tuple[int, ...] = (1,)
    ahead: int = 100  # sessions per lookahead pass; few sessions get several outcomes each
    interruption: float = 0.0  # probability that a request interrupts drafting before a lookahead pass
    pages: int = 4096  # in the target's cache
    weight_scale: int = 60_000  # resolution of rounded draft_probs
    width: int = 1  # tokens per forward pass; further tokens ignore those before them
    recurrent: int = 1  # tokens per forward pass; a recurrent head unlike the draft predicts further tokens
    step_cost: ForwardCost | None = None  # profiled target step cost, which makes drafts expensive
    altered: Callable[[Block, random.Random], Block] | None = None  # changes a drafter's block in transit
    reads_states: bool = False  # whether the method reads the target's hidden states
    keeps_states: bool = True  # whether the target stores them with its cache
    enough_states: int | None = None  # latest states that suffice if earlier ones would need recomputation
    has_recurrent_target: bool = False  # whether the target has a recurrent layer
    grammar: str = ""  # for every text
    grammars: GrammarCompiler | None = None  # over the vocabulary
    masks_drafts: bool = True  # whether the drafter applies the grammar
    rules: TokenRules = NO_RULES
    translator: Translator | None = None  # of a draft with another vocabulary
    draft_prompt: tuple[int, ...] = ()  # the prompt in that draft's tokens
    lock_step: bool = False  # reference loop: draft for all sessions, verify all, never draft ahead

    @property
    def vocabulary(self) -> int:
        return int(self.target_logits.shape[0])

    @property
    def context(self) -> int:
        return len(self.prompt) + self.new_tokens


class ToyDraft(ToyRunner):
    """Drafting method over a toy model that can be interrupted."""

    def forward(
        self, rows: Sequence[InputRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        if interrupted():
            raise Interrupted
        output = super().forward(rows, copies)
        return output._replace(hidden=output.logits)


class HalvedLogitsHead:
    """Recurrent head with half of the draft's logits."""

    def __init__(self, logits: Tensor, width: int) -> None:
        self.width = width
        self._logits = logits / 2

    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        """Returns the logits after each token; ignores the states."""
        return ForwardOutput(self._logits[torch.tensor(tokens)], states)


def generations(setting: Setting, sessions: int, rng: random.Random) -> Iterator[Generation]:
    """Returns repeated requests with the same prompt and different seeds."""
    for index in range(sessions):
        yield a_generation(
            session=f"s{index}",
            prompt=setting.prompt,
            max_len=setting.context,
            stop_ids=(EOS,),
            sampling=setting.sampling,
            seed=rng.getrandbits(64),
            draft_seed=rng.getrandbits(64),
            hash_key=rng.getrandbits(64),
            acceptance=setting.acceptance,
            draft_tokens=setting.draft_tokens,
            grammar=setting.grammar,
            rules=setting.rules,
            draft_prompt=setting.draft_prompt,
        )


class RandomPacing:
    """Policy that makes half of its decisions at random, because no decision may change a text."""

    def __init__(self, sessions: int, least_chance: float) -> None:
        self._adaptive = Adaptive()
        self._least_chance = least_chance
        self._rng = random.Random(sessions + 4)

    def decide(self, drafts: DraftValue, limit: int, load: Load, now: float) -> DraftingDecision:
        decision = self._adaptive.decide(drafts, limit, load, now)
        if self._rng.random() < 0.5:
            return decision
        return DraftingDecision(
            self._rng.randint(1, limit),
            least_chance=self._least_chance,
            hold_step=self._rng.random() < 0.8,
            skip_for_s=self._rng.uniform(0.0, 2 * STEP_S),
        )

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        return self._rng.uniform(0.0, 2 * STEP_S)


def pacing_of(setting: Setting, sessions: int) -> PacingPolicy:
    if setting.lock_step:
        return LockStep()
    return RandomPacing(sessions, 0.0 if setting.step_cost is None else 0.1)


def a_verification_scheduler(setting: Setting, sessions: int) -> VerificationScheduler:
    limits = VerificationLimits(
        setting.vocabulary,
        setting.context,
        max_sessions=sessions,
        max_step_tokens=8 * sessions,
        pages=setting.pages,
        page_size=PAGE_SIZE,
        max_queued=sessions,
        states=LAYOUT if setting.reads_states else None,
        keeps_states=setting.keeps_states,
        trees=not setting.has_recurrent_target,
    )
    return VerificationScheduler(limits, pacing_of(setting, sessions), setting.step_cost)


def a_draft_scheduler(setting: Setting, sessions: int) -> DraftScheduler:
    layout = LAYOUT if setting.reads_states else None
    bounds = StateBounds(min_states=setting.enough_states)
    limits = DrafterLimits(setting.vocabulary, setting.context, sessions, layout, bounds)
    return DraftScheduler(limits, draft_ahead=not setting.lock_step)


def an_executor(setting: Setting) -> StepExecutor:
    runner = ToyRunner(setting.target_logits)
    if setting.has_recurrent_target:
        runner = RecurrentRunner(setting.target_logits, PAGE_SIZE)
    if setting.reads_states:
        runner = RememberingRunner(setting.target_logits, setting.pages, PAGE_SIZE, setting.keeps_states)
    return StepExecutor(runner, setting.vocabulary, grammars=setting.grammars)


def a_draft_model(setting: Setting, sessions: int, clock: Callable[[], float], **options: Any) -> DraftModel:
    masked = torch.cat([setting.draft_logits, setting.draft_logits.mean(dim=0, keepdim=True)])
    columns = int(setting.draft_logits.shape[0])
    return toy_draft_model(
        ToyDraft(masked),
        8 * sessions,
        PAGE_SIZE,
        columns,
        weight_scale=setting.weight_scale,
        grammars=setting.grammars if setting.masks_drafts else None,
        clock=clock,
        masks=MaskTokens(columns, setting.width),
        head=HalvedLogitsHead(setting.draft_logits, setting.recurrent) if setting.recurrent > 1 else None,
        **options,
    )


def a_translated_method(
    setting: Setting, sessions: int, clock: Callable[[], float], translator: Translator
) -> tuple[TranslatedMethod, DraftModel]:
    texts: dict[str, TranslatedText] = {}
    model = a_draft_model(setting, sessions, clock, noise=TranslatedNoise(texts))
    return TranslatedMethod(model, lambda _: translator, texts), model


@torch.inference_mode()
def rounds_in_lock_step(setting: Setting, generation: Generation) -> Iterator[CommittedTokens]:
    """Yields the reference loop's commits for one session, round by round; then asserts that nothing is running."""
    alone = replace(setting, lock_step=True)
    method = a_draft_model(alone, 8, clock=lambda: 0.0)  # cache for a whole text
    verification = a_verification_scheduler(alone, 1)
    drafting = a_draft_scheduler(alone, 1)
    executor = an_executor(alone)
    yield from lock_step(Session(generation), drafting, method, verification, executor)
    if (last := verification.plan(LATER_S)) is not None:
        verification.apply(executor.step(last), 0.0, LATER_S)
    assert verification.is_idle
    verification.admission.pages.check()
    assert drafting.is_idle
    assert method.is_idle


def texts_in_lock_step(setting: Setting, sessions: int, seed: int) -> list[tuple[int, ...]]:
    """Returns the reference loop's texts for the sessions of `World(setting, sessions, seed)`."""
    return [
        tuple(token for emit in rounds_in_lock_step(setting, generation) for token in emit.tokens)
        for generation in generations(setting, sessions, random.Random(seed))
    ]
