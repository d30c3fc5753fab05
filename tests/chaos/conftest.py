"""Command-line options: duration, rate and targets of chaos."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=1.0, help="of load under injected failures")
    parser.addoption("--every", type=float, default=5.0, help="seconds between two failures, on average")
    parser.addoption("--kinds", default="", help="of failures, separated by commas, as in 'rank killed,stream cut'")
    parser.addoption("--chaos-seed", type=int, default=None, help="seed of the failures; random and printed by default")
    parser.addoption(
        "--overlap", action="store_true", help="also hit pools that have not recovered from an earlier failure"
    )
    parser.addoption("--ranks", type=int, default=1, help="of each target")
    parser.addoption("--schedule", default="lock_step", help="as in speculation.schedule")
    parser.addoption("--table", metavar="FILE", help="where the table of recovery times is to be written")
