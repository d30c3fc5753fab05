"""Alerts fire as expected, evaluated by promtool; skipped unless promtool is installed."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.k8s.overlays import K8S, load

PROMTOOL = shutil.which("promtool")
RULES = K8S / "components" / "monitoring" / "prometheus-rule.yaml"
RUNNING = "ray_slipstream_running_requests"
TARGET = 'ray_serve_deployment_replica_healthy{deployment="Target"}'
DRAFTER = 'ray_serve_deployment_replica_healthy{deployment="Drafter"}'
SERVED = 'ray_slipstream_requests_total{status="200"}'
FAILED = 'ray_slipstream_requests_total{status="500"}'
TURNED_AWAY = 'ray_slipstream_requests_total{status="429"}'
DIFFERS = 'ray_slipstream_audits_total{cause="differs"}'
EQUAL = 'ray_slipstream_audits_total{cause="equal"}'
IN_10_S = 'ray_slipstream_time_to_first_token_seconds_bucket{le="10"}'
IN_30_S = 'ray_slipstream_time_to_first_token_seconds_bucket{le="30"}'
EVER = 'ray_slipstream_time_to_first_token_seconds_bucket{le="+Inf"}'
NONFINITE = 'ray_slipstream_nonfinite_logits_total{cause="ended", replica="r"}'
FALLBACKS = 'ray_slipstream_attention_fallbacks_total{cause="gathered", replica="r"}'
WASTED = 'ray_slipstream_received_draft_tokens_total{cause="wasted"}'
ACCEPTED = 'ray_slipstream_received_draft_tokens_total{cause="accepted"}'
LOST = 'ray_slipstream_handovers_total{cause="lost", pool="target", replica="r"}'
PLANNED = 'ray_slipstream_handovers_total{cause="planned", pool="target", replica="r"}'
GIVEN_UP = 'ray_slipstream_drafter_remedies_total{remedy="given up", drafter="d", replica="r"}'
REFUSED = 'ray_slipstream_refused_messages_total{cause="frame", replica="r"}'
STRANGERS = 'ray_slipstream_refused_peers_total{cause="a caller without a valid token", replica="r"}'
LATE_BLOCKS = 'ray_slipstream_refused_peers_total{cause="a Block for a session that it was not assigned", replica="r"}'
BREAKER = 'ray_slipstream_breaker_open{drafter="d", replica="r"}'
SPECULATION = "ray_slipstream_speculation_on"
TOKENS = "ray_slipstream_completion_tokens_total"
PREEMPTED = 'vllm:num_preemptions_total{replica="r"}'
STRANGER = {"replica": "r", "cause": "a caller without a valid token"}
CASES: list[tuple[str, dict[str, str], dict[str, str], list[str], list[str]]] = [
    # One value per minute; `_` means no sample. A series begins with its first count.
    ("SlipstreamNotScraped", {RUNNING: "0x10 _x20 0x30"}, {}, ["25m"], ["5m", "17m", "40m"]),
    ("SlipstreamNoTarget", {TARGET: "1x10 0x20 1x30", DRAFTER: "1x60"}, {}, ["20m"], ["5m", "12m", "40m"]),
    ("SlipstreamErrors", {SERVED: "0+10x120", FAILED: "0x20 1+1x40 41x60"}, {}, ["40m"], ["15m", "23m", "90m"]),
    ("SlipstreamErrors", {SERVED: "0+30x120", FAILED: "0+1x120", TURNED_AWAY: "0+9x120"}, {}, [], ["40m", "90m"]),
    ("SlipstreamAuditDiffers", {EQUAL: "0+1x60", DIFFERS: "_x10 1x50"}, {}, ["12m", "50m"], ["5m"]),
    ("SlipstreamAuditDiffers", {EQUAL: "0+1x60"}, {}, [], ["12m", "50m"]),
    ("SlipstreamNonfiniteLogits", {NONFINITE: "_x10 1x200"}, {"replica": "r"}, ["12m", "60m"], ["5m", "80m"]),
    ("SlipstreamTurnsAway", {SERVED: "0+10x120", TURNED_AWAY: "0x20 1+1x40 41x60"}, {}, ["40m"], ["25m", "90m"]),
    ("SlipstreamTurnsAway", {SERVED: "0+30x120", TURNED_AWAY: "0+1x120", FAILED: "0+9x120"}, {}, [], ["40m", "90m"]),
    ("SlipstreamSlowFirstToken", {IN_10_S: "0+9x60", IN_30_S: "0+10x60", EVER: "0+10x60"}, {}, ["30m"], ["5m"]),
    ("SlipstreamSlowFirstToken", {IN_10_S: "0+97x60", IN_30_S: "0+100x60", EVER: "0+100x60"}, {}, [], ["30m"]),
    ("SlipstreamSlowAttention", {FALLBACKS: "_x10 1x50"}, {"replica": "r"}, ["12m", "50m"], ["5m"]),
    ("SlipstreamDraftsWasted", {WASTED: "0+9x120", ACCEPTED: "0+1x120"}, {}, ["60m"], ["20m"]),
    ("SlipstreamDraftsWasted", {WASTED: "0+3x120", ACCEPTED: "0+1x120"}, {}, [], ["60m"]),
    ("SlipstreamPeersLost", {LOST: "_x10 3x40 5x60"}, {"pool": "target"}, ["13m", "55m"], ["5m", "35m", "100m"]),
    ("SlipstreamPeersLost", {PLANNED: "_x10 3x40 5x60"}, {}, [], ["13m", "55m"]),
    ("SlipstreamDrafterGivenUp", {GIVEN_UP: "_x10 1x200"}, {"drafter": "d"}, ["13m", "60m"], ["5m", "80m"]),
    ("SlipstreamMalformedMessages", {REFUSED: "_x10 1x90"}, {"replica": "r"}, ["13m", "24m"], ["5m", "40m"]),
    ("SlipstreamRefusedPeers", {STRANGERS: "_x10 1x40 3x60"}, STRANGER, ["13m", "55m"], ["5m", "40m", "100m"]),
    ("SlipstreamRefusedPeers", {LATE_BLOCKS: "_x10 1x40 3x60"}, {}, [], ["13m", "55m"]),
    ("SlipstreamBreakerOpen", {BREAKER: "0x10 1x50 0x60"}, {"drafter": "d"}, ["45m"], ["20m", "90m"]),
    ("SlipstreamBreakerOpen", {BREAKER: "0x10 1x5 0x60"}, {}, [], ["17m", "30m", "45m"]),
    ("SlipstreamSpeculationOff", {SPECULATION: "1x10 0x120 1x60", TOKENS: "0+9x190"}, {}, ["90m"], ["60m", "140m"]),
    ("SlipstreamSpeculationOff", {SPECULATION: "1x10 0x120 1x60", TOKENS: "9x190"}, {}, [], ["90m", "140m"]),
    ("SlipstreamCacheFull", {PREEMPTED: "0x10 0+12x50 612x60"}, {"replica": "r"}, ["50m"], ["20m", "100m"]),
    ("SlipstreamCacheFull", {PREEMPTED: "0+3x120"}, {}, [], ["50m", "100m"]),
]


def groups() -> Any:
    (manifest,) = load(RULES)
    return manifest["spec"]["groups"]


def rules() -> dict[str, Any]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"]}


def test_every_alert_is_tested_firing_and_silent() -> None:
    assert {alert for alert, _, _, firing, _ in CASES if firing} == rules().keys()
    assert {alert for alert, _, _, _, silent in CASES if silent} == rules().keys()


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool; on Debian: apt install prometheus")
@pytest.mark.parametrize(("alert", "series", "labels", "firing", "silent"), CASES)
def test_alerts_fire_as_expected(
    tmp_path: Path, alert: str, series: dict[str, str], labels: Any, firing: list[str], silent: list[str]
) -> None:
    rule = rules()[alert]
    expected_alert = {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": rule["annotations"]}
    checks = [
        {"eval_time": time, "alertname": alert, "exp_alerts": [expected_alert] if time in firing else []}
        for time in (*firing, *silent)
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": given, "alert_rule_test": checks}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    assert PROMTOOL is not None, "else it is skipped"
    done = subprocess.run([PROMTOOL, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
