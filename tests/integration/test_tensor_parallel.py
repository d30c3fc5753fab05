"""Several processes compute one model: over gloo's sockets and over shared memory, and as a target's ranks."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from actors.compute.collectives import HostGroup, TorchGroup, join
from actors.engine.step_codec import StepEncoder
from actors.engine.step_link import StepCaller
from actors.engine.tensor_parallel import Rank, RankSpec
from actors.models.checkpoint import load
from cluster.config import CacheConfig, Resources
from cluster.verification.step import Row, StepPlan
from protos.messages import Open, Sampling

RANKS = 2
CPU = torch.device("cpu")
TOKENS = torch.tensor([[1, 5, 3, 7]])


@torch.no_grad()
def a_rank(rank: int, folder: Path) -> None:
    """Loads its shard, and writes the logits for each kind of process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    group = join(CPU)
    assert isinstance(group, HostGroup), "both ranks are on this host"
    logits = [load(folder, "float32", CPU, each).model(TOKENS).logits for each in (group, TorchGroup())]
    torch.save(torch.cat(logits), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_ranks_compute_the_same_as_one(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    model.save_pretrained(tmp_path)
    before = set(Path("/dev/shm").glob("slipstream-*"))
    mp.spawn(a_rank, (tmp_path,), RANKS)
    with torch.no_grad():
        expected = model(TOKENS).logits.expand(2, -1, -1)
    for rank in range(RANKS):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=1e-5, atol=1e-5)
    assert set(Path("/dev/shm").glob("slipstream-*")) <= before, "nothing is left behind"


NAMES = ("one", "two")
SAMPLINGS = (Sampling(temperature=0.0), Sampling())
PROMPT = tuple(range(1, 20))
STEPS = 6


def target_rank(index: int, folder: Path, ranks: int) -> None:
    """Runs a rank; the leader writes the tokens of two sessions."""
    resources = Resources(num_cpus=1)
    spec = RankSpec(str(folder), 33, "float32", len(NAMES), 64, CacheConfig(page_size=16), resources, ranks, 64)
    rank = Rank(index, spec)
    rank.load(f"file://{folder / f'meeting-{ranks}'}")
    rank.allocate(8)
    if index:
        with pytest.raises(ConnectionError):
            rank.follow()
        return
    rank.profile()
    steps_path, grammar_path = rank.listen()
    leading = threading.Thread(target=rank.lead)
    leading.start()
    (folder / f"tokens-{ranks}").write_text(json.dumps(asyncio.run(decided_tokens(steps_path, grammar_path))))
    leading.join()


async def decided_tokens(steps_path: str, grammar_path: str) -> list[list[int]]:
    """Decodes both sessions without speculation; the first step is the longest message."""
    caller = await StepCaller.dial(steps_path)
    grammar_caller = await StepCaller.dial(grammar_path)
    encoder = StepEncoder()
    tokens = [[*PROMPT], [*PROMPT[::-1]]]
    opens = tuple(
        Open.measured(name, tuple(text), 60, 0, sampling)
        for name, text, sampling in zip(NAMES, tokens, SAMPLINGS, strict=True)
    )
    for step in range(STEPS):
        begins = [len(text) - 1 if step else 0 for text in tokens]
        rows = [
            Row(name, tuple(text[begin:]), begin, True, (2 * at, 2 * at + 1))
            for at, (name, text, begin) in enumerate(zip(NAMES, tokens, begins, strict=True))
        ]
        answer = await caller.call(encoder.step(StepPlan((), () if step else opens, tuple(rows))))
        for text, outcome in zip(tokens, encoder.outcomes(answer), strict=True):
            text.append(outcome.next_token)
    caller.close()
    grammar_caller.close()
    return tokens


@pytest.mark.timeout(240)
def test_three_ranks_decide_the_same_as_one_and_end_with_their_leader(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=64)
    LlamaForCausalLM(config).eval().save_pretrained(tmp_path)
    for ranks in (1, 3):
        mp.spawn(target_rank, (tmp_path, ranks), ranks)
    alone, together = (json.loads((tmp_path / f"tokens-{ranks}").read_text()) for ranks in (1, 3))
    assert [len(text) for text in alone] == [len(PROMPT) + STEPS] * 2
    assert together == alone
