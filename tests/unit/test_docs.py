"""Checks the documents against the repository: generated pages, files, links, headings and commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cluster.config import MOVED_KEYS, SlipstreamConfig, validated
from docs.generate import PAGES, all_keys, key_lists, page, stale_pages
from tools.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in ("docs", "examples", "k8s") for path in (ROOT / folder).rglob("*.md"))]
)
FOLDERS = ("protos", "cluster", "actors", "serve_app", "tests", "benchmarks", "examples", "docs", "k8s")
FILE_TYPES = (".py", ".md", ".yaml", ".safetensors", ".proto")
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^]]*\]\(([^)\s]+)\)")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(path: Path) -> set[str]:
    """Returns GitHub's anchors of a page's headings."""
    prose = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(document: Path) -> Iterator[list[str]]:
    """Yields the lines of shell blocks, with continuation lines joined and without comments."""
    for language, block in FENCE.findall(document.read_text()):
        if language in {"sh", "bash"}:
            for line in block.replace("\\\n", " ").splitlines():
                yield shlex.split(line, comments=True)


def test_the_generated_half_is_current() -> None:
    assert stale_pages() == [], "run `make docs` and commit the result"


def test_a_changed_key_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, generate in PAGES.items():
        monkeypatch.setitem(PAGES, path, lambda generate=generate: generate() + "\nsomething new")
    assert stale_pages() == ["configuration.md"]
    for path in PAGES:
        assert page(path).startswith(path.read_text().splitlines()[0]), "what is written by hand stays"


def test_every_key_is_explained() -> None:
    assert {key.section.partition(".")[0] for key in all_keys()} == set(SlipstreamConfig.model_fields)
    assert [str(key) for key in all_keys() if not key.meaning] == [], "keys without a description in cluster/config.py"


def test_every_key_has_an_item_or_is_part_of_a_reference() -> None:
    items = re.findall(r"^\* (`[^:(]+`)(?: \(.*?\))?:", key_lists(), re.MULTILINE)
    found = set()
    for first, *others in (re.findall("`(.+?)`", item) for item in items):
        found |= {first, *(f"{first.rpartition('.')[0]}.{name}" for name in others)}
    assert [str(key) for key in all_keys() if str(key) not in found and key.section not in found] == []


@every_document
def test_every_file_that_is_named_exists(document: Path) -> None:
    named = PATH.findall(document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@every_document
def test_every_link_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    for link in [*LINK.findall(text), *PICTURE.findall(text)]:
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            goal = (document.parent / path).resolve() if path else document
            assert goal.exists(), link
            assert not anchor or anchor in anchors(goal), link


def test_the_page_of_benchmarks_names_every_script_that_documents_its_usage() -> None:
    names = [str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").glob("*.py")]
    usage = re.compile(r"^    (?:PYTHONPATH=\. )?python (benchmarks/\w+\.py)", re.MULTILINE)
    scripts = {name for name in names if name in usage.findall((ROOT / name).read_text())}
    assert scripts == set(re.findall(r"`(benchmarks/\w+\.py)`", (ROOT / "docs" / "benchmarks.md").read_text()))


@every_document
def test_every_slipstream_command_and_option_exists(document: Path) -> None:
    for words in commands(document):
        if words[:1] == ["slipstream"]:
            command: Any = typer.main.get_command(app)  # typer's bundled click type
            names = words[1:]
            while hasattr(command, "commands") and names and not names[0].startswith("-"):
                assert names[0] in command.commands, words
                command = command.commands[names.pop(0)]
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert {word for word in names if word.startswith("--")} <= known, words


@every_document
def test_every_make_target_and_script_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) \?= ", makefile, re.MULTILINE))
    for words in commands(document):
        if words[:1] == ["make"]:
            assert {word.split("=")[0] for word in words[1:]} <= targets | variables, words
        if words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists() or (document.parent / words[1]).exists(), words


@every_document
def test_every_configuration_key_that_is_named_exists(document: Path) -> None:
    keys = {str(key) for key in all_keys()}
    sections = {".".join(key.split(".")[:depth]) for key in keys for depth in (1, 2, 3)}
    named = re.findall(rf"`((?:{'|'.join(SlipstreamConfig.model_fields)})\.[a-zA-Z0-9_.]+)", document.read_text())
    known = keys | sections | (set(MOVED_KEYS) if document.name == "CHANGELOG.md" else set())
    assert [key for key in named if key not in known and not key.endswith(FILE_TYPES)] == []


@every_document
def test_every_config_that_is_shown_is_right(document: Path) -> None:
    for language, block in FENCE.findall(document.read_text()):
        data = yaml.safe_load(block) if language == "yaml" else None
        if isinstance(data, dict) and "model" in data:
            validated(data)
