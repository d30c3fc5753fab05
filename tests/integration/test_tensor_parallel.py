"""Two processes compute one model, over gloo's sockets and over shared memory."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from actors.compute.collectives import HostGroup, TorchGroup, join
from actors.models.checkpoint import load

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
