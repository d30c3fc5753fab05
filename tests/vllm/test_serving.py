"""A vLLM target through the front door: Ray, gRPC, HTTP, and SmolLM2 in float32."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_app.cli.demo_models import demo_config
from serve_app.demo_data import BENCH_PROMPTS  # type: ignore[attr-defined]
