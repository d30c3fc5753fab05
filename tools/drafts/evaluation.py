"""Measures drafts in one process: a real target and real methods, without network or Ray.

The target decodes each text once in lock step and provides hidden states for any drafting method. A replay then drafts
at every position of the text. Under Gumbel coupling, committed tokens do not depend on drafts: the target's token is a
function of its prefix and the seed. Verification of a draft is therefore a comparison with the text, and one text
serves to measure many drafts.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

import torch

from actors.compute.hidden_states import StateCapture
from actors.compute.kv_cache import InputRow
from actors.drafters.lookup.ngram import NgramDraft
from actors.drafters.registry import DraftSetup, capture_spec, states_format
from actors.engine.executor import StepExecutor
from actors.engine.process import device_of
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load_model, local_folder, vocabulary
from actors.models.decoder import decoder_for
from actors.models.tokenizer_reader import end_ids, load_tokenizer
from cluster.config import DraftPool, ModelConfig, Resources
from cluster.drafting.method import DraftingMethod, ReadsStates
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.errors import ConfigError
from cluster.reference_loop import lock_step
from cluster.routing.ledger import CommittedTokens, Generation, Session
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, DraftRequest, Open, Sampling, Shape
from protos.prefix import Prefix
from serve_app.api.chat_template import ChatTemplate, TemplateOptions
from serve_app.api.draft_prompt import check_template

PAGE_SIZE = 16
STEP_TOKENS = 512
HASH_KEY = 1
SEED = 1000  # seed of the first prompt; each further prompt adds 1
DRAFT_SEED = 2000


@dataclass(frozen=True, slots=True)
class DecodedText:
    """Prompt with the target's continuation."""

    open: Open  # session request that contains the prompt
    tokens: tuple[int, ...]  # tokens of the whole text, prompt included
    states: bytes = field(default=b"", repr=False)  # encoded hidden states of all but the last token; empty if unused


class MeasuredTarget:
    """Loaded target; `context` limits the tokens of a text, including its prompt."""

    def __init__(self, model: ModelConfig, resources: Resources, context: int) -> None:
        self._model_config = model
        self._context = context
        self._folder = local_folder(model.target)
        self._device = device_of(resources)
        self._model = load_model(self._folder, model.dtype, self._device)
        self._decoder = decoder_for(self._model.eval(), context=context)
        self._pages = -(-context // PAGE_SIZE)
        self._runner = ModelRunner(self._model, self._pages, PAGE_SIZE, decoder=self._decoder, context=context)
        self._stops = end_ids(self._folder)
        self._vocabulary = vocabulary(self._folder)
        self._steps: list[float] = []  # durations of one-token steps, in seconds

    @property
    def step_s(self) -> float:
        """Returns the median duration of one-token steps so far, in seconds."""
        return median(self._steps)

    def prompt(self, text: str) -> tuple[int, ...]:
        """Tokenises `text` as the first user message of a chat, or directly if the model has no chat template."""
        tokenizer = load_tokenizer(self._folder)
        if tokenizer.chat_template is None:
            return tuple(tokenizer(text)["input_ids"])
        chat = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])

    def setup(self, draft: DraftPool, draft_tokens: int) -> DraftSetup:
        """Returns the deployment's facts for a drafting method of this target."""
        return DraftSetup(
            self._model_config.dtype,
            self._context,
            draft_tokens,
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
        draft_tokens: int,
        acceptance: Acceptance = Acceptance.COUPLED,
    ) -> Generation:
        """Returns a request for `tokens` tokens after prompt `index`. Raises ConfigError if they exceed the context."""
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
            draft_tokens=draft_tokens,
        )

    def run(self, generation: Generation, method: DraftingMethod, *, trees: bool) -> Iterator[CommittedTokens]:
        """Decodes in lock step, with a method that reads no hidden states."""
        limits = VerificationLimits(
            self._runner.vocabulary, self._context, 1, STEP_TOKENS, self._pages, PAGE_SIZE, trees=trees
        )
        target = VerificationScheduler(limits, LockStep())
        drafter = DraftScheduler(DrafterLimits(self._runner.vocabulary, self._context, 1), draft_ahead=False)
        executor = StepExecutor(self._runner, self._runner.vocabulary)
        return lock_step(Session(generation), drafter, method, target, executor)

    def decode(self, generation: Generation) -> DecodedText:
        """Decodes with minimal speculation; under Gumbel coupling, drafts do not change the text."""
        tokens = list(generation.prompt)
        ends = []
        for emit in self.run(generation, NgramDraft(1, 1), trees=False):
            tokens += emit.tokens
            ends.append(time.perf_counter())
        self._steps += [end - began for began, end in pairwise(ends)]  # without the first step, which reads the prompt
        return DecodedText(generation.open_with(generation.prompt, attempt=1), tuple(tokens))

    @torch.inference_mode()
    def states(self, draft: DraftPool, texts: Sequence[DecodedText]) -> list[bytes]:
        """Returns the method's encoded hidden states, one entry per text; empty if it reads none."""
        spec = capture_spec(draft, self._folder, self._model_config.dtype)
        if spec is None:
            return [b""] * len(texts)
        kept = replace(spec, is_kept=True)  # keep the states of whole texts until the end
        capture = StateCapture(kept, self._pages, PAGE_SIZE, self._device, spec.projection_on(self._device))
        runner = ModelRunner(
            self._model, self._pages, PAGE_SIZE, decoder=self._decoder, capture=capture, context=self._context
        )
        return [self._captured(runner, text.tokens[:-1]) for text in texts]

    def _captured(self, runner: ModelRunner, tokens: tuple[int, ...]) -> bytes:
        pages = tuple(range(self._pages))
        for start in range(0, len(tokens), STEP_TOKENS):
            part = tokens[start : start + STEP_TOKENS]
            runner.forward([InputRow(part, start, 1, pages[: -(-(start + len(part)) // PAGE_SIZE)])])
        return runner.read_states(range(len(tokens)))


def draft_prompts(draft: DraftPool, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns each prompt as a conversation in the draft's chat template; empty ones if the draft translates prompts.

    Raises ModelError if `draft.prompt` is `template` and there is no template.
    """
    if draft.template is None:
        return [()] * len(prompts)
    template = ChatTemplate(check_template(local_folder(draft.template, with_weights=False)))
    return [template.encode([{"role": "user", "content": prompt}], TemplateOptions()) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Replay:
    """Drafts after a prefix of a text, and the text's actual continuation."""

    room: int  # maximum block size at this position
    next_tokens: tuple[int, ...]  # next tokens of the text
    chain: DraftTree
    tree: DraftTree
    chain_s: float  # seconds to draft the chain
    tree_s: float


def replay(
    method: DraftingMethod,
    text: DecodedText,
    draft_tokens: int,
    nodes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Replay]:
    """Requests a chain of `draft_tokens` and a tree of `nodes` tokens at each position after the prompt.

    A method that reads hidden states receives the states of all but the last token. Directly after the prompt it
    receives none and drafts nothing, since the target has not read the prompt yet.
    """
    opened = text.open
    method.open(opened)
    prefix = Prefix(opened.hash_key, opened.tokens)
    row_bytes = method.states_format.row_bytes if isinstance(method, ReadsStates) else 0
    sent = 0
    found = []
    for length in range(opened.prompt_len, len(text.tokens)):
        if length > opened.prompt_len:
            method.committed(opened.session, text.tokens[length - 1 : length])
            prefix.extend(text.tokens[length - 1 : length])
            if isinstance(method, ReadsStates):
                method.states(opened.session, sent, text.states[sent * row_bytes : (length - 1) * row_bytes])
                sent = length - 1
        is_ready = length > opened.prompt_len or not row_bytes
        found.append(_replay(method, text, prefix, draft_tokens if is_ready else 0, nodes if is_ready else 0, clock))
    method.close([opened.session])
    return found


def _replay(
    method: DraftingMethod, text: DecodedText, prefix: Prefix, draft_tokens: int, nodes: int, clock: Callable[[], float]
) -> Replay:
    room = text.open.max_len - prefix.length - 1

    def ask(shape: Shape, most: int) -> tuple[DraftTree, float]:
        if min(most, room) < 1 or shape not in method.shapes:
            return NO_TREE, 0.0
        request = DraftRequest(text.open.session, 1, prefix.length, prefix.hash, min(most, room), shape=shape)
        began = clock()
        (proposal,) = method.draft([request])
        return proposal.tree, clock() - began

    (chain, chain_s) = ask(Shape.CHAIN, draft_tokens)
    (tree, tree_s) = ask(Shape.TREE, nodes)
    return Replay(room, text.tokens[prefix.length :], chain, tree, chain_s, tree_s)


def committed_tokens(place: Replay, draft: DraftTree, most: int) -> int:
    """Returns the number of tokens committed by verification of the draft's first `most` tokens."""
    accepted = len(draft.first(min(most, place.room)).along(place.next_tokens))
    return min(accepted + 1, len(place.next_tokens))


def verifies(places: Sequence[Replay], most: int, *, trees: bool) -> int:
    """Returns the number of verify steps for a text with blocks of `most` tokens."""
    count = 0
    at = 0
    while at < len(places):
        place = places[at]
        at += committed_tokens(place, place.tree if trees else place.chain, most)
        count += 1
    return count


BEST = 4  # report agreement for the best 1 to BEST candidates


@dataclass(frozen=True, slots=True)
class DraftMeasures:
    """Results of one draft at one temperature."""

    draft: str
    method: str
    temperature: float
    positions: int  # number of drafting positions
    offered: float  # share of positions with a draft
    agreement: tuple[float, ...]  # share of positions with the correct token in the best 1, 2, ... candidates
    chains: Mapping[int, float]  # tokens per verification, by draft length
    trees: Mapping[int, float]  # tokens per verification, by number of nodes
    token_s: float | None  # seconds per chain token; None without chains
    tree_s: float | None  # seconds per tree; None without trees
    states_bytes: int  # bytes of hidden states per token on the wire


def measures(
    draft: str,
    method: str,
    temperature: float,
    texts: Sequence[Sequence[Replay]],
    draft_lengths: Sequence[int],
    nodes: Sequence[int],
    states_bytes: int,
) -> DraftMeasures:
    """Computes the results over all positions with room for a block, in all texts."""
    places = [place for text in texts for place in text if place.room > 0]
    chained = sum(len(place.chain) for place in places)
    grown = sum(len(place.tree) > 0 for place in places)
    return DraftMeasures(
        draft=draft,
        method=method,
        temperature=temperature,
        positions=len(places),
        offered=sum(len(place.chain) + len(place.tree) > 0 for place in places) / len(places),
        agreement=tuple(sum(_rank(place) < best for place in places) / len(places) for best in range(1, BEST + 1)),
        chains={most: _tokens_a_verify(texts, most, trees=False) for most in draft_lengths},
        trees={most: _tokens_a_verify(texts, most, trees=True) for most in nodes},
        token_s=sum(place.chain_s for place in places) / chained if chained else None,
        tree_s=sum(place.tree_s for place in places) / grown if grown else None,
        states_bytes=states_bytes,
    )


def _rank(place: Replay) -> float:
    """Returns the correct token's rank among the draft's candidates, from 0; infinity if absent."""
    first = place.tree.children(-1) or place.chain.children(-1)
    return first.index(place.next_tokens[0]) if place.next_tokens[0] in first else float("inf")


def _tokens_a_verify(texts: Sequence[Sequence[Replay]], most: int, *, trees: bool) -> float:
    return sum(map(len, texts)) / sum(verifies(text, most, trees=trees) for text in texts)
