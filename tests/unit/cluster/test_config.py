"""Tests reading the configuration: precedence, refusals, and the key named in each refusal."""

import re
from pathlib import Path
from typing import get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from cluster.config import MOVED_KEYS, DraftPool, SlipstreamConfig, load_config, validated
from cluster.errors import ConfigError

SMALLEST = {"model": {"target": "org/model"}, "draft": {"method": "ngram"}}


def written(folder: Path, data: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_two_keys_are_enough(tmp_path):
    config = load_config(written(tmp_path, SMALLEST))
    assert config == validated(SMALLEST)
    assert config.model.name == "model"
    assert config.speculation.acceptance == "coupled"
    assert (config.target.tensor_parallel, config.draft.replicas.max) == (1, 1)


def test_command_line_beats_environment_beats_file(tmp_path):
    data = SMALLEST | {"server": {"port": 1, "host": "a", "drain_s": 1}}
    environment = {"SLIPSTREAM__SERVER__PORT": "2", "SLIPSTREAM__SERVER__HOST": "b", "UNRELATED": "{"}
    config = load_config(written(tmp_path, data), ["server.port=3"], environment)
    assert (config.server.port, config.server.host, config.server.drain_s) == (3, "b", 1)


def test_overrides_make_sections_and_keep_their_neighbours(tmp_path):
    config = load_config(
        written(tmp_path, SMALLEST), ["target.resources_per_rank.num_gpus=0.75", "target.tensor_parallel=3"]
    )
    assert config.target.resources_per_rank.num_gpus == 0.75
    assert config.target.tensor_parallel == 3


def test_ranks_that_would_share_a_gpu_are_refused() -> None:
    target = {"tensor_parallel": 2, "resources_per_rank": {"num_gpus": 0.5}}
    with pytest.raises(ConfigError, match="so Ray may place several ranks on one GPU"):
        validated(SMALLEST | {"target": target})


def test_a_block_that_no_step_can_hold_is_refused() -> None:
    def config(max_step_tokens: int) -> SlipstreamConfig:
        return validated(
            SMALLEST | {"target": {"max_step_tokens": max_step_tokens}, "speculation": {"draft_tokens": 8}}
        )

    assert config(9).target.max_step_tokens == 9
    with pytest.raises(ConfigError, match=r"draft_tokens is 8, expected at most 7: a step .* raise target\.max_step"):
        config(8)


def test_folders_are_relative_to_the_file_and_ids_stay_ids(tmp_path):
    """A config must work from any folder, and a Hugging Face id must not become a path."""
    (tmp_path / "models" / "draft").mkdir(parents=True)
    config = load_config(written(tmp_path, {"model": {"target": "org/model"}, "draft": {"model": "models/draft"}}))
    assert config.model.target == "org/model"
    assert config.draft.model == str(tmp_path / "models" / "draft")
    home = load_config(written(tmp_path, SMALLEST), ["model.target=~/m"])
    assert home.model.target == str(Path.home() / "m")
    missing = load_config(written(tmp_path, SMALLEST), ["model.target=./not-there"])
    assert missing.model.target == str(tmp_path / "not-there")


WRONG = {
    "unknown key": ("target.tensor_paralel=2", "target.tensor_paralel"),
    "unknown section": ("sever.port=1", "sever"),
    "below its bound": ("target.max_step_tokens=0", "target.max_step_tokens"),
    "beyond its bound": ("speculation.draft_tokens=129", "speculation.draft_tokens"),
    "wrong type": ("server.port=many", "server.port"),
    "not one of": ("speculation.acceptance=typical", "speculation.acceptance"),
    "bounds swapped": ("draft.replicas={min: 3, max: 2}", "draft.replicas"),
    "a draft model without one": ("draft.method=draft_model", "draft"),
    "a model that is not used": ("draft.model=org/draft", "draft"),
    "ngrams swapped": ("draft.ngram.max_ngram=1", "draft.ngram"),
    "into a value": ("model.target.x=1", "model.target.x"),
    "no value": ("model.target", "model.target"),
    "no YAML value": ("model.target=[", "model.target"),
    "nothing": ("model.target=", "model.target"),
}


@pytest.mark.parametrize(("override", "named"), WRONG.values(), ids=WRONG)
def test_invalid_values_are_refused_by_name(tmp_path, override, named):
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, SMALLEST), [override])
    assert named in str(error.value)


def test_every_wrong_key_is_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)model\.dtype.*server\.port"):
        validated(SMALLEST | {"model": {"target": "m", "dtype": "int3"}, "server": {"port": -1}})


@pytest.mark.parametrize("content", [b"a: [", b"- a list", b"", b"\xff\xfe\x00bad"], ids=repr)
def test_a_file_that_is_no_mapping_is_refused_by_its_path(tmp_path, content):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: [1\nb: 2\n", "line 2, column 2: expected ',' or ']', but got ':', while parsing a flow sequence"),
        ("a: b: c\n", "line 1, column 5: mapping values are not allowed here"),
        ("a: 1\n\tb: 2\n", "line 2, column 1: found character '\\t' that cannot start any token"),
        ("a: \x07", "unacceptable character #x0007: special characters are not allowed, at position 3"),
    ],
)
def test_a_syntax_error_is_located_in_the_file(tmp_path, content, problem):
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path} is not valid YAML: {problem}")


def test_a_missing_file_is_refused_by_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_the_environment_names_its_variable(tmp_path):
    with pytest.raises(ConfigError, match="SLIPSTREAM__MODEL__TARGET__X"):
        load_config(written(tmp_path, SMALLEST), environment={"SLIPSTREAM__MODEL__TARGET__X": "1"})


def test_a_config_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        validated(SMALLEST).server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"draft": {"method": "eagle", "modle": "x"}}, "draft.modle: unknown key; did you mean model?"),
        (
            {"draft": {"eagle": {"output_nrom": 1}}},
            "draft.eagle.output_nrom: unknown key; did you mean output_norm?",
        ),
        ({"server": {"audit": {"zzz": 1}}}, "server.audit.zzz: unknown key; expected one of share, "),
        ({"modell": {}}, "modell: unknown key; did you mean model? expected one of model, target, draft,"),
        ({"models": {"a": {"target": {"vlm": 1}}}}, "models.a.target.vlm: unknown key; did you mean vllm?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_known_ones(section, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        validated(section)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"server": {"port": 99999}}, "server.port: expected at most 65535"),
        ({"server": {"port": "many"}}, "server.port: expected an integer"),
        ({"server": {"page": "maybe"}}, "server.page: expected true or false"),
        ({"server": 5}, "server: expected a mapping"),
        ({"model": {}}, "model.target: missing key; add it"),
        ({"model": {"target": "m", "dtype": "int3"}}, "model.dtype: expected 'float32', 'bfloat16' or 'float16'"),
        ({"draft": {"replicas": {"min": 3, "max": 2}}}, "draft.replicas: max is 2, expected at least min (3)"),
    ],
)
def test_an_invalid_value_is_refused_with_the_expected_one(section, expected):
    with pytest.raises(ConfigError) as error:
        validated(SMALLEST | section)
    assert str(error.value) == f"invalid configuration\n  {expected}"


def sections_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Yields all sections of a configuration, including nested ones, as key paths."""
    found = [path]
    for name, field in model.model_fields.items():
        named = ("NAME",) if get_origin(field.annotation) is dict else ()
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += sections_of(kind, (*path, name, *named))
    return found


@pytest.mark.parametrize("path", sections_of(SlipstreamConfig), ids=".".join)
def test_unknown_keys_are_reported_in_every_section(path):
    data: dict[str, object] = {"zzz": 1}
    for name in reversed(path):
        data = {name: data}
    with pytest.raises(ConfigError, match=re.escape(f"{'.'.join((*path, 'zzz'))}: unknown key; expected")):
        validated(data)


def test_every_key_has_a_place_in_the_schema():
    assert set(SlipstreamConfig.model_json_schema()["properties"]) == {
        "models",
        "drafts",
        "model",
        "target",
        "draft",
        "speculation",
        "server",
        "trust",
        "tracing",
        "kubernetes",
    }


INT8 = {"model": "org/draft", "draft_model": {"quantization": "int8"}}


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_float8_and_four_bits_are_for_gpus(quantization):
    draft = {"model": "org/draft", "draft_model": {"quantization": quantization}}
    with pytest.raises(ConfigError, match=rf"draft_model\.quantization {quantization} requires GPUs"):
        validated(SMALLEST | {"draft": draft})
    on_gpus = validated(SMALLEST | {"draft": draft | {"resources": {"num_gpus": 1}}})
    assert on_gpus.draft.draft_model.quantization == quantization


def test_eight_bits_are_for_cpus():
    with pytest.raises(ConfigError, match=r"draft_model\.quantization int8 requires CPUs"):
        validated(SMALLEST | {"draft": INT8 | {"resources": {"num_gpus": 0.5}}})
    assert validated(SMALLEST | {"draft": INT8}).draft.draft_model.quantization == "int8"


@pytest.mark.parametrize(
    ("draft", "named"),
    [
        ({"method": "ngram", "draft_model": {"quantization": "int8"}}, "options in draft_model"),
        ({"method": "ngram", "states": {"dtype": "float8"}}, "reads no hidden states"),
        ({"model": "org/draft", "ngram": {"max_ngram": 9}}, "options in ngram"),
    ],
)
def test_options_of_a_method_that_is_not_used_are_refused(draft, named):
    with pytest.raises(ConfigError, match=named):
        validated(SMALLEST | {"draft": draft})
    both = {"method": "hybrid", "ngram": {"max_ngram": 9}} | INT8
    assert validated(SMALLEST | {"draft": both}).draft.ngram.max_ngram == 9


@pytest.mark.parametrize(("old", "replacement"), MOVED_KEYS.items())
def test_a_removed_key_is_refused_with_its_replacement(tmp_path, old, replacement):
    """The key may come from the file, the environment or the command line."""
    section, key = old.split(".")
    variable = f"SLIPSTREAM__{section.upper()}__{key.upper()}"
    for data, overrides, environment in (
        (SMALLEST | {section: {"method": "ngram"} | {key: 1}}, [], {}),
        (SMALLEST, [f"{old}=1"], {}),
        (SMALLEST, [], {variable: "1"}),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(written(tmp_path, data), overrides, environment)
        assert f"{old} {replacement}" in str(error.value)


@pytest.mark.parametrize(
    "replacement", [replacement for replacement in MOVED_KEYS.values() if replacement.startswith("is draft")]
)
def test_renamed_keys_point_to_existing_keys(replacement):
    part = SlipstreamConfig
    for name in replacement.split()[1].split("."):
        assert name in part.model_fields
        part = part.model_fields[name].annotation


def test_the_example_configuration_is_valid() -> None:
    assert load_config(Path(__file__).parents[3] / "examples" / "llama.yaml").target.tensor_parallel == 4


@pytest.mark.parametrize(("layers", "ids"), [(3, (0, 1, 2)), ([0, 1, 28], (0, 1, 28))])
def test_layers_to_draft_with_are_a_number_or_ids(layers, ids):
    draft = validated(SMALLEST | {"draft": {"method": "layer_skip", "layer_skip": {"layers": layers}}}).draft
    assert draft.layer_skip.ids == ids


@pytest.mark.parametrize("layers", [0, [], [-1, 2], [2, 1], [1, 1]], ids=str)
def test_impossible_layers_are_refused(layers):
    with pytest.raises(ConfigError, match=r"draft\.layer_skip"):
        validated(SMALLEST | {"draft": {"method": "layer_skip", "layer_skip": {"layers": layers}}})


def test_each_method_declares_whether_it_needs_a_model():
    with pytest.raises(ConfigError, match="layer_skip uses no model"):
        validated(SMALLEST | {"draft": {"method": "layer_skip", "model": "org/draft"}})
    with pytest.raises(ConfigError, match="hybrid needs a model"):
        validated(SMALLEST | {"draft": {"method": "hybrid"}})


def test_the_draft_pool_may_be_empty_and_the_target_pool_may_not() -> None:
    config = validated({"model": {"target": "t"}, "draft": {"method": "suffix", "replicas": {"min": 0}}})
    assert config.draft.replicas.min == 0
    with pytest.raises(ConfigError, match=r"target\.replicas\.min"):
        validated({"model": {"target": "t"}, "draft": {"method": "suffix"}, "target": {"replicas": {"min": 0}}})


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (
            {"max_sessions": 4, "replicas": {"sessions_per_replica": 8}},
            "is 8, expected at most max_sessions \\(4\\)",
        ),
        ({"replicas": {"per_target": 2, "sessions_per_replica": 8}}, "mutually exclusive"),
        ({"replicas": {"per_target": 2}}, "per_target is 2, but min and max fix the pool at 1; raise"),
        ({"replicas": {"min": 2, "max": 1}}, "max is 1, expected at least min \\(2\\)"),
    ],
    ids=["more than there are places", "coupled and by need", "coupled and fixed", "bounds"],
)
def test_an_invalid_scaling_is_refused(draft: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validated({"model": {"target": "t"}, "draft": {"method": "suffix", **draft}})


@pytest.mark.parametrize(("earlier", "name"), [("prompt_lookup", "ngram"), ("lookup_first", "hybrid")])
def test_a_method_of_an_earlier_release_is_refused_with_its_name(earlier, name):
    with pytest.raises(ConfigError, match=f"{earlier} was renamed to {name}"):
        validated({"model": {"target": "owner/model"}, "draft": {"method": earlier}})


def test_ratio_is_an_alias_of_rejection_sampling():
    config = validated(
        {"model": {"target": "owner/model"}, "draft": {"method": "ngram"}, "speculation": {"acceptance": "ratio"}}
    )
    assert config.speculation.acceptance == "rejection"


LEARNING = {"folder": "learning"}


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({"method": "dflash", "learning": LEARNING}, "method dflash does not support learning"),
        ({"method": "eagle", "learning": LEARNING | {"replay": "general.jsonl"}}, "replay needs the target's states"),
    ],
)
def test_an_unlearnable_draft_is_refused(draft, why):
    with pytest.raises(ValueError, match=why):
        DraftPool.model_validate({"model": "head"} | draft)
    for method in ("eagle", "medusa", "mlp_speculator"):
        assert DraftPool.model_validate({"method": method, "model": "head", "learning": LEARNING}).learning is not None


NAMED = {"model": {"target": "t", "served_name": "x"}}
TWO = {
    "models": {
        "large": {"model": {"target": "org/Large"}, "target": {"tensor_parallel": 2}},
        "small": {"model": {"target": "org/Small", "served_name": "org/Small"}, "draft": "cheap"},
    },
    "draft": {"method": "suffix"},
    "drafts": {"cheap": {"method": "ngram"}},
}


def test_a_single_model_is_a_list_of_one():
    config = validated(SMALLEST)
    assert [(one.config, one.target, one.drafter) for one in config.served] == [(config, "Target", "Drafter")]


def test_each_of_several_models_is_configured_as_if_alone():
    config = validated(TWO)
    alone = [
        validated({"model": {"target": "org/Large", "served_name": "large"}, "draft": {"method": "suffix"}}
                  | {"target": {"tensor_parallel": 2}}),
        validated({"model": TWO["models"]["small"]["model"], "draft": {"method": "ngram"}}),
    ]  # fmt: skip
    assert [one.config for one in config.served] == alone
    assert [(one.target, one.drafter) for one in config.served] == [
        ("Target-large", "Drafter"),
        ("Target-small", "Drafter-cheap"),
    ]
    assert config.served_names == ("large", "org/Small")
    assert config.model == alone[0].model, "code for a single model serves the first one"


def test_models_of_one_pool_share_its_drafters():
    models = {name: {"model": {"target": name}} for name in ("a", "b")}
    config = validated({"models": models, "draft": {"method": "ngram"}})
    assert config.pools == {"Drafter": tuple(one.config for one in config.served)}


def test_the_given_settings_make_the_same_configuration():
    for data in (SMALLEST, TWO):
        assert validated(validated(data).given()) == validated(data)


def test_paths_and_overrides_of_several_models(tmp_path):
    (tmp_path / "folder").mkdir()
    overrides = ["models.small.model.target=./folder", "models.large.target.tensor_parallel=4"]
    large, small = (one.config for one in load_config(written(tmp_path, TWO), overrides).served)
    assert (small.model.target, large.target.tensor_parallel) == (str(tmp_path / "folder"), 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": {"target": "x"}}, "model: a configuration with models has this below models.NAME"),
        ({"drafts": {}}, "models use draft pools cheap, which are missing in drafts"),
        ({"drafts": {"cheap": {"method": "ngram"}, "idle": {"method": "ngram"}}}, "drafts.idle is the draft pool of"),
        ({"models": {"a": NAMED, "b": NAMED}, "drafts": {}}, "several models or adapters are served as x"),
        ({"server": {"served_names": ["x"]}}, "server.served_names names a single model"),
        ({"models": {"Large": {"model": {"target": "t"}}}}, "models.Large.[key]: expected a string that matches"),
        ({"models": {"a": {"model": {"target": "t"}}, "b": {"model": {"target": "u"}}},
          "draft": {"method": "medusa", "model": "h"}, "drafts": {}}, "draft serves several models, but method medusa"),
        ({"models": {"a": {"model": {"target": "t"}, "speculation": {"acceptance": "rejection"},
                           "target": {"engine": "vllm", "cache_per_rank": {"gib": 1}}}}, "drafts": {}},
         "speculation.acceptance is rejection, but vLLM"),
    ],
)  # fmt: skip
def test_contradictions_between_models_are_refused(change, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        validated(TWO | change)


def test_only_a_draft_model_has_a_prompt_of_its_own() -> None:
    model = {"target": "t"}
    hybrid = validated({"model": model, "draft": {"method": "hybrid", "model": "d", "prompt": "template"}})
    assert hybrid.draft.template == "d"
    elsewhere = hybrid.draft.model_copy(update={"tokenizer": "t"})
    assert (elsewhere.template, elsewhere.model_copy(update={"prompt": "text"}).template) == ("t", None)
    with pytest.raises(ConfigError, match=r"method ngram has no chat template of its own; remove draft\.prompt"):
        validated({"model": model, "draft": {"method": "ngram", "prompt": "template"}})
