"""Command-line options: duration, rate and targets of chaos."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=1.0, help="of load under blows")
    parser.addoption("--every", type=float, default=5.0, help="seconds between two blows, on average")
    parser.addoption("--kinds", default="", help="of blows, separated by commas, as in 'rank killed,stream cut'")
    parser.addoption("--chaos-seed", type=int, default=None, help="of who is struck when; drawn, and told, by default")
    parser.addoption("--overlap", action="store_true", help="strike pools, too, that are not whole from a blow before")
    parser.addoption("--ranks", type=int, default=1, help="of each target")
    parser.addoption("--schedule", default="lock_step", help="as in speculation.schedule")
    parser.addoption("--table", metavar="FILE", help="where the table of recovery times is to be written")
