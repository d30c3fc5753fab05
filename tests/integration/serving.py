"""A served demo pair for tests: real Ray, real gRPC, real HTTP, the real models in float32."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from openai import AsyncOpenAI, OpenAI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.config import SlipstreamConfig
from serve_app.app import APPLICATION, application
from serve_app.cli.demo_models import demo_config
from serve_app.operations.local import serving, wait_until_ready

EXACT = ("model.dtype=float32", "model.max_context=1024", "server.port=0")
# What Ray counts and what the cache takes: little, for the first application has its share already.
SMALL = ("target.resources_per_rank.num_cpus=0.1", "draft.resources.num_cpus=0.1", "target.cache_per_rank.gib=0.1")
NEAR_TIE = 2e-3  # logits that differ by less may be ordered otherwise by another batch shape


@dataclass(frozen=True)
class Served:
    """An endpoint and ways to look behind it."""

    url: str
    config: SlipstreamConfig
    application: str = APPLICATION

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def async_client(self) -> AsyncOpenAI:
        """A new one each time: connections belong to the event loop of the test that makes them."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    def inspect(self, deployment: str) -> list[dict[str, Any]]:
        """What each replica of a deployment holds; nothing while there is none."""
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
def demo_served_beside(served: Served, name: str, *overrides: str) -> Iterator[Served]:
    """Serves the same with other settings, as an application of its own on the cluster of the first one."""
    beside = Served(f"{served.url}/{name}", demo_config([*EXACT, *SMALL, *overrides]), name)
    serve.run(application(beside.config), name=name, route_prefix=f"/{name}")
    try:
        wait_until_ready(beside.url)
        yield beside
    finally:
        serve.delete(name)


class Reference:
    """Plain Hugging Face generation with the target, in this process."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt_ids(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    @torch.inference_mode()
    def greedy(self, prompt: str, max_tokens: int) -> list[int]:
        ids = torch.tensor([self.prompt_ids(prompt)])
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, use_cache=True
        )
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens

    @torch.inference_mode()
    def assert_greedy(self, prompt: str, max_tokens: int, text: str) -> bool:
        """Whether `text` is the greedy answer; a difference must begin where two logits nearly tie."""
        expected = self.greedy(prompt, max_tokens)
        if text == self.tokenizer.decode(expected, skip_special_tokens=True):
            return True
        logits = self._model(torch.tensor([self.prompt_ids(prompt) + expected])).logits[0, -len(expected) - 1 : -1]
        self._assert_near_tie(logits, expected, text)
        return False

    def _assert_near_tie(self, logits: torch.Tensor, expected: Sequence[int], text: str) -> None:
        for position in range(len(expected)):
            if text.startswith(self.tokenizer.decode(expected[: position + 1], skip_special_tokens=True)):
                continue
            best, second = logits[position].topk(2).values.tolist()
            assert best - second < NEAR_TIE, (
                f"differs at token {position}, where the best logit leads by {best - second}"
            )
            return
        raise AssertionError(f"the text goes on beyond the reference: {text!r}")
