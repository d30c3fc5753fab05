"""The `trust` section allows at most one method, with files relative to the config."""

import pytest

from cluster.config import load_config, validated
from cluster.errors import ConfigError

MODELS = {"model": {"target": "t"}, "draft": {"method": "ngram"}}


@pytest.mark.parametrize(
    "trust",
    [
        {"certificates": "/c", "token_file": "/t"},
        {"certificates": "/c", "insecure": True},
        {"token_file": "/t", "insecure": True},
    ],
)
def test_one_way_at_most(trust):
    with pytest.raises(ConfigError, match=f"{' and '.join(trust)} are set, expected at most one"):
        validated({**MODELS, "trust": trust})


def test_nothing_is_logged_by_default():
    trust = validated(MODELS).trust
    assert (trust.certificates, trust.token_file, trust.insecure, trust.reflection) == (None, None, False, False)


@pytest.mark.parametrize(("given", "expected"), [("tls/{role}", "{folder}/tls/{role}"), ("/tls", "/tls")])
def test_files_are_relative_to_the_config(tmp_path, given, expected):
    path = tmp_path / "config.yaml"
    path.write_text("model: {target: t}\ndraft: {method: ngram}\n" + f"trust: {{certificates: '{given}'}}\n")
    assert load_config(path).trust.certificates == expected.replace("{folder}", str(tmp_path))
