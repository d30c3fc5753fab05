"""Transformers model of the served target, which measures how close to a tie each token of an answer was.

It runs on whole texts without a cache, blocks or pages. It applies the real logits processors, which other tests
compare with their own reference.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from actors.grammars import GrammarCompiler, load_grammar_vocabulary
from actors.sampling.acceptance import DrawAddress
from actors.sampling.logits_processors import PROCESSOR_FACTORIES, chain_of
from actors.sampling.scoring import margin
from cluster.config import SlipstreamConfig
from cluster.routing.ledger import Generation
from protos.messages import Open
from serve_app.api.fields import RequestBounds, check
from serve_app.api.logprobs import token_text
from serve_app.api.request_schemas import CompletionRequest
from serve_app.api.text import TextCodec
from serve_app.api.validation import bad_words_of, check_request, load_defaults, resolve, truncated


class PlainModel:
    """Target in this process, in float32."""

    def __init__(self, config: SlipstreamConfig) -> None:
        folder = config.model.target
        self.codec = TextCodec.load(Path(folder), config.server)
        self.tokenizer = self.codec.tokenizer
        self._config = config
        self._defaults = load_defaults(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._factories = (*PROCESSOR_FACTORIES, GrammarCompiler(load_grammar_vocabulary(Path(folder))).masking)
        self._ids_by_text: dict[str, list[int]] = defaultdict(list)  # several ids may share a text
        for token in range(self.codec.vocabulary):
            self._ids_by_text[token_text(self.codec.token_bytes(token))].append(token)

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the log probabilities after each token, (tokens, vocabulary)."""
        return torch.log_softmax(self._logits(ids).double(), dim=-1)

    def ids(self, texts: Sequence[str]) -> list[int]:
        """Returns the ids of tokens given by unique texts."""
        found = []
        for one in texts:
            (token,) = self._ids_by_text[one]
            found.append(token)
        return found

    def generations(self, fields: dict[str, Any]) -> list[Generation]:
        """Returns the generations of a completion body, resolved like in the API."""
        request = self._defaults.applied(check(CompletionRequest, fields, RequestBounds()))
        codec = self.codec
        context = self._config.model.max_context
        prompts = [prompt if isinstance(prompt, tuple) else codec.encode(prompt) for prompt in request.prompt]
        check_request(request, config=self._config, max_token_chars=codec.max_token_chars)
        return resolve(
            request,
            [truncated(request, prompt, context) for prompt in prompts],
            config=self._config,
            eos_ids=codec.eos_ids,
            vocabulary=codec.vocabulary,
            draw=lambda: 0,
            bad_words=bad_words_of(request, codec),
        )

    @torch.inference_mode()
    def widest_margin(self, generation: Generation, texts: Sequence[str]) -> float:
        """Returns the smallest logit error that explains an answer, given by its tokens' texts.

        The result is 0 if each token is the greedy choice after its prefix.
        """
        text = list(generation.prompt)
        chain = chain_of(_open(generation), self._factories)
        widest = 0.0
        for one in texts:
            logits = self._logits(text)[-1]
            if chain is not None:
                chain.follow(text)
            at = DrawAddress(generation.seed, generation.choice, len(text))
            sampling = generation.sampling
            found, token = min((margin(logits, sampling, chain, at, token), token) for token in self._ids_by_text[one])
            widest = max(widest, found)
            text.append(token)
        return widest

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([list(ids)])).logits[0]
        return logits


def _open(generation: Generation) -> Open:
    """Returns the Open message of a new session."""
    return Open(
        session=generation.session,
        attempt=1,
        tokens=generation.prompt,
        prompt_len=len(generation.prompt),
        max_len=generation.max_len,
        stop_ids=generation.stop_ids,
        sampling=generation.sampling,
        seed=generation.seed,
        choice=generation.choice,
        hash_key=generation.hash_key,
        acceptance=generation.acceptance,
        draft_tokens=0,
        grammar=generation.grammar,
        rules=generation.rules,
    )
