"""A child process limits the time and memory of chat templates, and serves the next one after a failure."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from serve_app.api.chat_template import Rendering, TemplateFailure, render_here
from serve_app.api.template_process import TemplateProcess

PLAIN = "{% for one in messages %}{{ one.role }}: {{ one.content }};{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ONE_OPERATION = "{{ 9 ** (9 ** 9) }}"  # holds the GIL, so no other thread runs
DOUBLING = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
LIMIT = "more than 0.3 s of processor time"
MEMORY = "more memory"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(cpu_s=0.3)
    yield process
    process.close()
    assert not [one for one in psutil.Process().children() if "template_worker" in " ".join(one.cmdline())]


def rendering(template: str, content: Any = "hé\n") -> Rendering:
    return Rendering(template, [{"role": "user", "content": content}], {"tools": None}, 1 << 20)


def test_the_rendered_text_equals_this_processs(process: TemplateProcess) -> None:
    assert process(rendering(PLAIN)) == render_here(rendering(PLAIN)) == "user: hé\n;"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (ENDLESS, LIMIT),
        (ONE_OPERATION, LIMIT),
        (DOUBLING, "of memory|more memory"),  # depending on the limit reached first
        ("{{ 'a' * 10 ** 11 }}", MEMORY),
        ("{{ 'a' | center(10 ** 10) }}", MEMORY),
        ("{{ 'a' * 2 ** 21 }}", "2097152 characters"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_template_over_its_limits_ends_alone(process: TemplateProcess, template: str, says: str) -> None:
    with pytest.raises(TemplateFailure, match=says.replace(".", r"\.")):
        process(rendering(template))
    assert process(rendering(PLAIN)) == "user: hé\n;"


def test_a_too_deeply_nested_conversation_fails(process: TemplateProcess) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateFailure, match="nested"):
        process(rendering(PLAIN, nested))


def test_callers_are_served_concurrently(process: TemplateProcess) -> None:
    with ThreadPoolExecutor(2) as threads:
        endless = threads.submit(process, rendering(ENDLESS))
        while not endless.done():
            assert process(rendering(PLAIN)) == "user: hé\n;"
        assert isinstance(endless.exception(), TemplateFailure)


def test_a_killed_process_is_restarted() -> None:
    process = TemplateProcess()
    try:
        assert process(rendering(PLAIN))
        (program,) = [one for one in psutil.Process().children() if "template_worker" in " ".join(one.cmdline())][-1:]
        ended = [*program.children(), program]
        for one in ended:
            os.kill(one.pid, signal.SIGKILL)
        assert not psutil.wait_procs(ended, timeout=60)[1]
        assert process(rendering(PLAIN)) == "user: hé\n;"
    finally:
        process.close()
