"""The demo pair's answers validate against JSON schemas, and speculation changes none of them.

`SLIPSTREAM_JSON_ANSWERS` sets the number of answers. Prints the gain of drafters that know the schema.
"""

import json
import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from actors.drafters.registry import DraftSetup, create_method
from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from actors.grammars import GrammarCompiler, load_grammar_vocabulary
from actors.models.checkpoint import load_model, local_folder, vocabulary
from cluster.drafting.method import DraftingMethod
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.reference_loop import lock_step
from cluster.routing.ledger import Generation, Session
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from protos.messages import Acceptance, Sampling
from serve_app.api.fields import ResponseFormat
from serve_app.api.grammars import content_grammar
from serve_app.api.text import TextCodec
from serve_app.cli.demo import demo_config
from tests.exhaustive.schemas import SCHEMA_PROMPTS, SchemaPrompt

ANSWERS = int(os.environ.get("SLIPSTREAM_JSON_ANSWERS", "60"))
CONTEXT = 512
PAGE_SIZE = 16
MAX_TOKENS = 320
DRAFTED = 6


class Pair:
    """Demo target and draft in this process, with grammars for both."""

    def __init__(self) -> None:
        config = demo_config(["model.dtype=float32"])
        self.folder = local_folder(config.model.target)
        self.codec = TextCodec.load(self.folder)
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.grammars = GrammarCompiler(load_grammar_vocabulary(self.folder))
        self._tokens = vocabulary(self.folder)
        model = load_model(self.folder, "float32", torch.device("cpu")).eval()
        self._runner = ModelRunner(model, CONTEXT // PAGE_SIZE, PAGE_SIZE)
        setup = DraftSetup("float32", CONTEXT, DRAFTED, self._tokens, config.model.target)
        self.unmasked = create_method(config.draft, setup)
        self.masked = create_method(config.draft, replace(setup, processor_factories=(self.grammars.draft_masking,)))

    def generation(self, index: int, asked: SchemaPrompt, draft_tokens: int) -> Generation:
        chat = [{"role": "user", "content": f"{asked.prompt} Answer in JSON."}]
        prompt = self.codec.encode_chat(chat)
        body = {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.schema, "strict": True}}
        grammar = content_grammar(ResponseFormat.model_validate(body), None)
        return Generation(
            session=f"s{index}",
            prompt=prompt,
            max_len=len(prompt) + MAX_TOKENS,
            stop_ids=self.codec.eos_ids,
            sampling=Sampling(temperature=(0.0, 0.7, 1.0)[index % 3]),
            seed=index,
            draft_seed=index + 1,
            choice=0,
            hash_key=3,
            acceptance=Acceptance.COUPLED,
            draft_tokens=draft_tokens,
            grammar=grammar.text,
        )

    @torch.inference_mode()
    def answer(self, generation: Generation, method: DraftingMethod) -> Session:
        """Generates an answer with the reference loop."""
        session = Session(generation)
        limits = VerificationLimits(len(self._tokens), CONTEXT, 1, CONTEXT, CONTEXT // PAGE_SIZE, PAGE_SIZE)
        target = VerificationScheduler(limits, LockStep())
        drafter = DraftScheduler(DrafterLimits(len(self._tokens), CONTEXT, 1), draft_ahead=False)
        executor = StepExecutor(self._runner, len(self._tokens), grammars=self.grammars)
        for _ in lock_step(session, drafter, method, target, executor):
            pass
        return session


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.mark.timeout(7200)
def test_every_answer_validates_and_a_drafter_that_knows_the_schema_is_accepted_more_often(pair: Pair, capsys) -> None:
    counts: Counter[str] = Counter()
    for index in range(ANSWERS):
        asked = SCHEMA_PROMPTS[index % len(SCHEMA_PROMPTS)]
        generation = pair.generation(index, asked, DRAFTED)
        session = pair.answer(generation, pair.masked)
        text = pair.tokenizer.decode(session.committed, skip_special_tokens=True)
        Draft202012Validator(asked.schema).validate(json.loads(text))
        counts["tokens"] += len(session.committed)
        other = pair.answer(generation, pair.unmasked)
        assert other.committed == session.committed
        for name, one in (("masked", session), ("unmasked", other)):
            counts[f"{name} drafted"] += one.counts.drafted
            counts[f"{name} accepted"] += one.counts.accepted
            counts[f"{name} steps"] += one.counts.verifies
        if index < len(SCHEMA_PROMPTS):
            plain = pair.answer(pair.generation(index, asked, 0), pair.unmasked)
            assert plain.committed == session.committed
    rates = {name: counts[f"{name} accepted"] / counts[f"{name} drafted"] for name in ("masked", "unmasked")}
    with capsys.disabled():
        print(f"\n{ANSWERS} answers validate: {dict(counts)}")
        print(f"accepted of drafted: {rates['masked']:.3f} with the mask, {rates['unmasked']:.3f} without")
    assert counts["masked accepted"] > counts["unmasked accepted"]
    assert rates["masked"] > rates["unmasked"]
