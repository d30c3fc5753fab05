"""A target that is loaded once, decodes in lock step, and provides hidden states for any drafting method."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import torch

from actors.compute.kv_cache import FeedRow
from actors.drafters.lookup.ngram import PromptLookup
from actors.drafters.registry import capture_spec, states_format
from actors.drafters.setup import DraftSetup
from actors.engine.capture import StateCapture
from actors.engine.executor import StepExecutor
from actors.engine.process import device_of
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load_model, local_folder, vocabulary
from actors.models.decoder import decoder_for
from actors.models.end_of_text import end_ids
from actors.models.tokenizer_reader import load_tokenizer
from cluster.config import DraftPool, ModelConfig, Resources
from cluster.drafting.method import DraftingMethod
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.errors import ConfigError
from cluster.reference_loop import lock_step
from cluster.routing.ledger import Emit, Generation, Session
from cluster.speculation.policy import LockStep
from cluster.verification.limits import VerificationLimits
from cluster.verification.scheduler import VerificationScheduler
from protos.messages import Acceptance, Open, Sampling

PAGE_SIZE = 16
STEP_TOKENS = 512
HASH_KEY = 1
SEED = 1000  # seed of the first prompt; later prompts count up
DRAFT_SEED = 2000


@dataclass(frozen=True, slots=True)
class DecodedText:
    """The target's continuation of a prompt."""

    open: Open  # for a session that begins with the prompt
    tokens: tuple[int, ...]  # prompt included
    states: bytes = field(default=b"", repr=False)  # encoded, of all tokens but the last; empty if unused


class MeasuredTarget:
    """A loaded target; `context` bounds the tokens of a text, prompt included."""

    def __init__(self, model: ModelConfig, resources: Resources, context: int) -> None:
        self._model_config = model
        self._context = context
        self._folder = local_folder(model.target)
        self._device = device_of(resources)
        self._model = load_model(self._folder, model.dtype, self._device)
        self._decoder = decoder_for(self._model.eval())
        self._pages = -(-context // PAGE_SIZE)
        self._runner = ModelRunner(self._model, self._pages, PAGE_SIZE, decoder=self._decoder)
        self._stops = end_ids(self._folder)
        self._vocabulary = vocabulary(self._folder)
        self._steps: list[float] = []  # durations of one-token steps, in seconds

    @property
    def step_s(self) -> float:
        """Median duration of a one-token step, in seconds, over all that was decoded so far."""
        return median(self._steps)

    def prompt(self, text: str) -> tuple[int, ...]:
        """Tokenizes `text` as the first message of a chat, or unchanged if the target has no chat template."""
        tokenizer = load_tokenizer(self._folder)
        if tokenizer.chat_template is None:
            return tuple(tokenizer(text)["input_ids"])
        chat = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])

    def setup(self, draft: DraftPool, max_draft_tokens: int) -> DraftSetup:
        """Returns the deployment facts that a method receives for this target."""
        return DraftSetup(
            self._model_config.dtype,
            self._context,
            max_draft_tokens,
            self._vocabulary,
            self._model_config.target,
            states_format(draft, self._folder),
        )

    def generation(
        self,
        index: int,
        prompt: tuple[int, ...],
        tokens: int,
        temperature: float,
        max_draft_tokens: int,
        acceptance: Acceptance = Acceptance.COUPLED,
    ) -> Generation:
        """Requests `tokens` tokens after prompt number `index`. Raises ConfigError if the context is too small."""
        if len(prompt) + tokens > self._context:
            raise ConfigError(
                f"prompt {index} has {len(prompt)} tokens, and {tokens} are to follow, expected at most"
                f" {self._context} in all; measure fewer tokens, or raise model.max_context"
            )
        return Generation(
            session=f"s{index}",
            prompt=prompt,
            max_len=len(prompt) + tokens,
            stop_ids=self._stops,
            sampling=Sampling(temperature=temperature),
            seed=SEED + index,
            draft_seed=DRAFT_SEED + index,
            choice=0,
            hash_key=HASH_KEY,
            acceptance=acceptance,
            max_draft_tokens=max_draft_tokens,
        )

    def run(self, generation: Generation, method: DraftingMethod, *, trees: bool) -> Iterator[Emit]:
        """Decodes in lock step with a method that reads no hidden states."""
        limits = VerificationLimits(
            self._runner.vocabulary, self._context, 1, STEP_TOKENS, self._pages, PAGE_SIZE, trees=trees
        )
        target = VerificationScheduler(limits, LockStep())
        drafter = DraftScheduler(DrafterLimits(self._runner.vocabulary, self._context, 1), draft_ahead=False)
        executor = StepExecutor(self._runner, self._runner.vocabulary)
        return lock_step(Session(generation), drafter, method, target, executor)

    def decode(self, generation: Generation) -> DecodedText:
        """Decodes with minimal speculation; under Gumbel coupling the committed text is the same for any drafts."""
        tokens = list(generation.prompt)
        ends = []
        for emit in self.run(generation, PromptLookup(1, 1), trees=False):
            tokens += emit.tokens
            ends.append(time.perf_counter())
        self._steps += [end - began for began, end in pairwise(ends)]  # without the first step, which reads the prompt
        return DecodedText(_opened(generation), tuple(tokens))

    @torch.inference_mode()
    def states(self, draft: DraftPool, texts: Sequence[DecodedText]) -> list[bytes]:
        """Returns, for each text, the encoded states that a method reads; empty for most methods."""
        spec = capture_spec(draft, self._folder, self._model_config.dtype)
        if spec is None:
            return [b""] * len(texts)
        kept = replace(spec, is_kept=True)  # whole texts are read after they have ended
        capture = StateCapture(kept, self._pages, PAGE_SIZE, self._device, spec.projection_on(self._device))
        runner = ModelRunner(self._model, self._pages, PAGE_SIZE, decoder=self._decoder, capture=capture)
        return [self._captured(runner, text.tokens[:-1]) for text in texts]

    def _captured(self, runner: ModelRunner, tokens: tuple[int, ...]) -> bytes:
        pages = tuple(range(self._pages))
        for start in range(0, len(tokens), STEP_TOKENS):
            part = tokens[start : start + STEP_TOKENS]
            runner.forward([FeedRow(part, start, 1, pages[: -(-(start + len(part)) // PAGE_SIZE)])])
        return runner.read_states(range(len(tokens)))


def _opened(generation: Generation) -> Open:
    """Returns the Open that a drafter would receive."""
    is_ratio = generation.acceptance is Acceptance.RATIO and not generation.sampling.greedy
    return Open(
        session=generation.session,
        attempt=1,
        tokens=generation.prompt,
        prompt_len=len(generation.prompt),
        max_len=generation.max_len,
        stop_ids=generation.stop_ids,
        sampling=generation.sampling,
        seed=generation.draft_seed if is_ratio else generation.seed,
        choice=generation.choice,
        hash_key=generation.hash_key,
        acceptance=generation.acceptance,
        max_draft_tokens=generation.max_draft_tokens,
    )
