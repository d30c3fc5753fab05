"""SIGTERM to `slipstream serve` on its own Ray cluster: running streams finish, and new requests are refused.

Not part of the default suite: `make test-exhaustive`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from openai import APIStatusError, OpenAI

from serve_app.cli.demo import demo_config
from tests.exhaustive.small_target import make_small_target
from tests.integration.test_serving import eventually

MODEL = "small"
TOKENS = 6000  # per stream: many seconds, even for a small target
SERVE = (sys.executable, "-c", "from serve_app.cli.main import main; main()", "serve")
END_S = 300


@contextmanager
def serving_process(config: Path) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """Runs the command like an init system; yields when it is ready."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [*SERVE, str(config), "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True
    ) as one:
        try:
            said = one.stdout.readline()
            assert said.startswith("Slipstream is ready: "), said
            yield one, OpenAI(base_url=said.split()[3], api_key="none", max_retries=0, timeout=END_S)
        finally:
            one.terminate()


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    target = make_small_target(tmp_path / "small", Path(demo_config([]).model.target))
    content = {
        "model": {"target": target, "served_name": MODEL, "dtype": "float32", "max_context": 8192},
        "target": {"cache_per_rank": {"gib": 0.1}},
        "draft": {"method": "ngram"},
        "server": {"drain_s": END_S},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def is_refused(client: OpenAI) -> bool:
    """Returns whether a new request is refused because the server is stopping."""
    try:
        client.completions.create(model=MODEL, prompt="Anew", max_tokens=1)
    except APIStatusError as error:
        return (error.status_code, error.code) == (503, "draining")
    return False


def test_running_streams_finish_and_new_requests_are_refused(config_file: Path) -> None:
    with serving_process(config_file) as (process, client), ThreadPoolExecutor(1) as beside:
        stream = client.completions.create(
            model=MODEL,
            prompt="Once",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        next(stream)
        reading = beside.submit(list, stream)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: is_refused(client), "new requests are refused")
        assert not reading.done(), "the stream had ended by then, so that nothing was left to finish"
        *_, last, total = reading.result()
        assert last.choices[0].finish_reason == "length"
        assert total.usage.completion_tokens == TOKENS
        assert process.wait(END_S) == 0
