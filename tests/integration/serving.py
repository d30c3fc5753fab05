"""Demo pair served for tests with real Ray, gRPC, HTTP and models in float32."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ServeApplicationSchema
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.config import SlipstreamConfig
from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config
from serve_app.operations import deploying
from serve_app.operations.local import serving

EXACT = ("model.dtype=float32", "model.max_context=1024", "server.port=0")
NEAR_TIE = 2e-3  # another batch shape may reorder logits with a smaller difference


@dataclass(frozen=True)
class Served:
    """Endpoint with access to its replicas' state."""

    url: str
    config: SlipstreamConfig
    application: str = APPLICATION

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def async_client(self) -> AsyncOpenAI:
        """Returns a new client, because a connection belongs to one event loop.

        Use it in `async with`. The garbage collector closes a client after its sockets, and the event loop may then
        stop reading from a newer connection with the same file descriptor.
        """
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    def inspect(self, deployment: str) -> list[dict[str, Any]]:
        """Returns the state of each replica of a deployment, possibly none."""
        handle = serve.get_deployment_handle(deployment, self.application)
        try:
            return list(handle.broadcast("inspect").results(timeout_s=20))
        except (DeploymentUnavailableError, RayActorError):
            return []


@contextmanager
def demo_served(*overrides: str) -> Iterator[Served]:
    """Serves the demo's config in float32 on a free port."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    config = demo_config([*EXACT, *overrides])
    with serving(config, Console(quiet=True)) as url:
        yield Served(url, config)


@contextmanager
def built_by(import_path: str) -> Iterator[None]:
    """Replaces the builder of the served application by `module:function`."""
    application_schema = deploying.application_schema

    def built(config: SlipstreamConfig, name: str, route_prefix: str = "/") -> ServeApplicationSchema:
        return application_schema(config, name, route_prefix).model_copy(update={"import_path": import_path})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deploying, "application_schema", built)
        yield


def greedy_texts(folder: str, prompts: Iterable[str], tokens: int) -> dict[str, str]:
    """Returns greedy continuations of raw prompts by transformers in float32, each of exactly `tokens` tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {}
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        out = model.generate(ids, do_sample=False, max_new_tokens=tokens, attention_mask=torch.ones_like(ids))
        texts[prompt] = str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


class Reference:
    """Greedy generation by transformers with the target, in this process."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._answers: dict[tuple[str, int], list[int]] = {}

    def prompt_ids(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    @torch.inference_mode()
    def greedy(self, prompt: str, max_tokens: int, begun: Sequence[int] = ()) -> list[int]:
        """Returns the greedy answer, including the prefix `begun`."""
        ended = bool(begun) and begun[-1] == self._model.generation_config.eos_token_id
        if ended or len(begun) == max_tokens:
            return list(begun)
        prompt_ids = self.prompt_ids(prompt)
        ids = torch.tensor([[*prompt_ids, *begun]])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens - len(begun),
            use_cache=True,
        )
        tokens: list[int] = out[0, len(prompt_ids) :].tolist()
        return tokens

    def assert_greedy(self, prompt: str, max_tokens: int, text: str) -> int:
        """Asserts that `text` is the greedy answer, except at near-ties of two logits.

        At a near-tie, the text may continue greedily from the second-best token. Returns the number of such places.
        """
        ties = 0
        asked = (prompt, max_tokens)
        if asked not in self._answers:
            self._answers[asked] = self.greedy(prompt, max_tokens)
        expected = self._answers[asked]
        begun: list[int] = []
        while text != self._text(expected):
            place = self._parting(expected, text)
            assert place >= len(begun), f"at token {place} the text has neither of two that nearly tie: {text!r}"
            begun = [*expected[:place], self._other_side(prompt, expected[:place])]
            expected = self.greedy(prompt, max_tokens, begun)
            ties += 1
        return ties

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _parting(self, expected: Sequence[int], text: str) -> int:
        """Returns the index of the first token that differs from the text."""
        for place in range(len(expected)):
            so_far = self._text(expected[: place + 1]).rstrip("\ufffd")  # an incomplete character
            if not text.startswith(so_far):
                return place
        raise AssertionError(f"the text goes on beyond the reference: {text!r}")

    @torch.inference_mode()
    def _other_side(self, prompt: str, begun: Sequence[int]) -> int:
        """Returns the second-best next token; asserts that it nearly ties with the best."""
        logits = self._model(torch.tensor([[*self.prompt_ids(prompt), *begun]])).logits[0, -1]
        values, ids = logits.topk(2)
        lead = float(values[0] - values[1])
        assert lead < NEAR_TIE, f"differs at token {len(begun)}, where the best logit leads by {lead}"
        return int(ids[1])
