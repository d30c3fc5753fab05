"""When alerts fire, by Prometheus' own reckoning; skipped, with a word, where its promtool is not installed."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.k8s.overlays import K8S, load

PROMTOOL = shutil.which("promtool")
RULES = K8S / "components" / "monitoring" / "prometheus-rule.yaml"
LOST = 'ray_slipstream_handovers_total{cause="lost", pool="target", replica="r"}'
PLANNED = 'ray_slipstream_handovers_total{cause="planned", pool="target", replica="r"}'
GIVEN_UP = 'ray_slipstream_drafter_remedies_total{remedy="given up", drafter="d", replica="r"}'
REFUSED = 'ray_slipstream_refused_messages_total{cause="frame", replica="r"}'
BREAKER = 'ray_slipstream_breaker_open{drafter="d", replica="r"}'
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool; on Debian: apt install prometheus")


@pytest.mark.parametrize(
    ("alert", "series", "values", "labels", "firing", "silent"),
    [
        # Values by the minute; `_` is none. The first count of a cause comes with its series.
        ("SlipstreamPeersLost", LOST, "_x10 3x40 5x60", {"pool": "target"}, ["13m", "55m"], ["5m", "35m", "100m"]),
        ("SlipstreamPeersLost", PLANNED, "_x10 3x40 5x60", {}, [], ["13m", "55m"]),
        ("SlipstreamDrafterGivenUp", GIVEN_UP, "_x10 1x200", {"drafter": "d"}, ["13m", "60m"], ["5m", "80m"]),
        ("SlipstreamMalformedMessages", REFUSED, "_x10 1x90", {"replica": "r"}, ["13m", "24m"], ["5m", "40m"]),
        ("SlipstreamBreakerOpen", BREAKER, "0x10 1x50 0x60", {"drafter": "d"}, ["45m"], ["20m", "90m"]),
        ("SlipstreamBreakerOpen", BREAKER, "0x10 1x5 0x60", {}, [], ["17m", "30m", "45m"]),
    ],
)
def test_alerts_fire_when_they_are_to(
    tmp_path: Path, alert: str, series: str, values: str, labels: Any, firing: list[str], silent: list[str]
) -> None:
    (manifest,) = load(RULES)
    (rule,) = [one for group in manifest["spec"]["groups"] for one in group["rules"] if one["alert"] == alert]
    told = {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": rule["annotations"]}
    checks = [
        {"eval_time": time, "alertname": alert, "exp_alerts": [told] if time in firing else []}
        for time in (*firing, *silent)
    ]
    test = {"interval": "1m", "input_series": [{"series": series, "values": values}], "alert_rule_test": checks}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": manifest["spec"]["groups"]}))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    assert PROMTOOL is not None, "else it is skipped"
    done = subprocess.run([PROMTOOL, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
