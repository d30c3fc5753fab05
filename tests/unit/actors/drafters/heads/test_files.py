"""Tests reading a head's folder: safetensors, shards, pickles, aliases, and tensors of the target."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles, read_head, target_tensor
from cluster.errors import ModelError

WEIGHT = torch.arange(6.0).reshape(2, 3)


class Unsafe:
    """Object whose unpickling would run code."""

    def __reduce__(self):
        return print, ("ran",)


def a_folder(path: Path, config: object = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"hidden_size": 3} if config is None else config))
    return path


def test_safetensors_go_before_pickles(tmp_path):
    folder = a_folder(tmp_path)
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    assert set(read_head(folder).tensors) == {"a"}
    save_file({"b": WEIGHT}, folder / "model.safetensors")
    found = read_head(folder)
    assert (found.config, set(found.tensors)) == ({"hidden_size": 3}, {"b"})
    assert torch.equal(found.tensor("b", (2, 3)), WEIGHT)


def test_shards_that_an_index_names_are_read_and_no_others(tmp_path):
    folder = a_folder(tmp_path)
    for name in "abc":
        save_file({name: WEIGHT}, folder / f"part-{name}.safetensors")
    index = {"weight_map": {name: f"part-{name}.safetensors" for name in "ab"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_head(folder).tensors) == {"a", "b"}


def test_a_file_of_any_name_is_found(tmp_path):
    folder = a_folder(tmp_path)
    torch.save({"0.0.linear.weight": WEIGHT}, folder / "medusa_lm_head.pt")
    assert torch.equal(read_head(folder).tensor("0.0.linear.weight"), WEIGHT)


def test_no_code_of_a_pickle_runs(tmp_path, capsys):
    folder = a_folder(tmp_path)
    torch.save({"a": Unsafe()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read as tensors alone"):
        read_head(folder)
    assert capsys.readouterr().out == ""


def test_the_state_of_a_training_is_not_read(tmp_path):
    folder = a_folder(tmp_path)
    torch.save({"a": WEIGHT}, folder / "pytorch_model.bin")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        torch.save(Unsafe(), folder / name)
    assert set(read_head(folder).tensors) == {"a"}


@pytest.mark.parametrize("held", [[WEIGHT], {"a": 1}], ids=["list", "number"])
def test_a_pickle_of_something_else_is_refused(tmp_path, held):
    torch.save(held, a_folder(tmp_path) / "pytorch_model.bin")
    with pytest.raises(ModelError, match="does not map names to tensors"):
        read_head(tmp_path)


def test_a_folder_without_a_head_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: .*No such file"):
        read_head(tmp_path)
    with pytest.raises(ModelError, match="holds no tensors"):
        read_head(a_folder(tmp_path))
    with pytest.raises(ModelError, match="a JSON list instead of an object"):
        read_head(a_folder(tmp_path, []))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: Expecting property name"):
        read_head(tmp_path)


def test_names_are_replaced_by_the_first_alias_that_fits():
    files = HeadFiles(Path("head"), {}, {"midlayer.a": WEIGHT, "model.b": WEIGHT, "c.midlayer.d": WEIGHT})
    renamed = files.renamed([("midlayer", "layers.0"), (r"model\.", "")])
    assert set(renamed.tensors) == {"layers.0.a", "b", "c.midlayer.d"}
    with pytest.raises(ModelError, match=r"the tensor b under two names; remove model\.b"):
        HeadFiles(Path("head"), {}, {"b": WEIGHT, "model.b": WEIGHT}).renamed([(r"model\.", "")])


def test_a_missing_or_misshapen_tensor_is_refused():
    files = HeadFiles(Path("head"), {}, {"a": WEIGHT})
    with pytest.raises(ModelError, match="head holds no tensor b, only a; fetch or convert the head again"):
        files.tensor("b")
    with pytest.raises(ModelError, match=r"a in head has shape \(2, 3\), expected \(3, 2\)"):
        files.tensor("a", (3, 2))


def test_the_first_existing_tensor_name_of_the_target_is_read(tmp_path):
    a_folder(tmp_path, {"model_type": "llama", "tie_word_embeddings": True})
    save_file({"model.embed_tokens.weight": WEIGHT, "other": -WEIGHT}, tmp_path / "model.safetensors")
    assert torch.equal(target_tensor(tmp_path, EMBEDDING), WEIGHT)
    assert torch.equal(target_tensor(tmp_path, HEAD), WEIGHT), "the head is tied"
    with pytest.raises(ModelError, match=r"holds none of lm_head\.bias"):
        target_tensor(tmp_path, ["lm_head.bias"])


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("gpt_neox.embed_in.weight", EMBEDDING),
        ("embed_out.weight", HEAD),
        ("transformer.word_embeddings.weight", EMBEDDING),
    ],
)
def test_names_of_other_architectures_are_borrowed(tmp_path, name, names):
    a_folder(tmp_path, {"model_type": "gpt_neox", "tie_word_embeddings": False})
    save_file({name: WEIGHT}, tmp_path / "model.safetensors")
    assert torch.equal(target_tensor(tmp_path, names), WEIGHT)


def test_a_quantized_lm_head_is_not_borrowed(tmp_path):
    a_folder(tmp_path, {"model_type": "llama", "tie_word_embeddings": False})
    tensors = {"model.embed_tokens.weight": WEIGHT, "lm_head.qweight": WEIGHT.to(torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds neither lm_head\.weight nor a tied embedding; use a target"):
        target_tensor(tmp_path, HEAD)
    assert torch.equal(target_tensor(tmp_path, EMBEDDING), WEIGHT)
    save_file({"lm_head.weight": WEIGHT.to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"borrows lm_head\.weight, which .* stores as float8_e4m3fn; use a target"):
        target_tensor(tmp_path, HEAD)
