"""What came of requests by the version of the prompt that clients name, of which only so many are told apart.

Acceptance by version:

    sum by (prompt_version) (rate(slipstream_prompt_version_tokens_total{kind="accepted"}[1h]))
      / sum by (prompt_version) (rate(slipstream_prompt_version_tokens_total{kind="drafted"}[1h]))

Mean time to the first token by version:

    sum by (prompt_version) (rate(slipstream_prompt_version_seconds_total{until="first token"}[1h]))
      / sum by (prompt_version) (rate(slipstream_prompt_version_choices_total[1h]))
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.http.observability.records import RequestRecord

MOST_VERSIONS = 32  # of one router; each is some ten series
OTHER = "other"
"""All versions that came after these."""

VERSION = "prompt_version"


class PromptVersions(Collector):
    """Sums by version, since the router began."""

    def __init__(self, most: int = MOST_VERSIONS) -> None:
        self._most = most
        self._requests: Counter[str] = Counter()
        self._choices: Counter[str] = Counter()  # that have had a token
        self._tokens: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def ended(self, record: RequestRecord, seconds: float) -> None:
        """A request that was understood is over, after so long."""
        asked = record.request
        if asked is None or asked.prompt_version is None:
            return
        named = asked.prompt_version
        version = named if named in self._requests or len(self._requests) < self._most else OTHER
        self._requests[version] += 1
        tokens = self._tokens[version]
        tokens["prompt"] += record.prompt_tokens
        for choice in record.choices:
            tokens["completion"] += choice.tokens
            tokens["drafted"] += choice.accepted + choice.rejected
            tokens["accepted"] += choice.accepted
            if choice.first_token_s is not None:
                self._choices[version] += 1
                self._seconds[version]["first token"] += choice.first_token_s
        self._seconds[version]["end"] += seconds

    def collect(self) -> Iterator[Metric]:
        """Of copies, for it is called in another thread than requests end in."""
        prefix = "slipstream_prompt_version"
        requests = CounterMetricFamily(f"{prefix}_requests", "Requests that have ended", labels=(VERSION,))
        choices = CounterMetricFamily(f"{prefix}_choices", "Choices that have had a token", labels=(VERSION,))
        tokens = CounterMetricFamily(f"{prefix}_tokens", "Tokens, by kind", labels=(VERSION, "kind"))
        seconds = CounterMetricFamily(f"{prefix}_seconds", "From request to end of answer", labels=(VERSION, "until"))
        for version, count in dict(self._requests).items():
            requests.add_metric((version,), count)
            choices.add_metric((version,), self._choices[version])
            for kind, sum_of in dict(self._tokens[version]).items():
                tokens.add_metric((version, kind), sum_of)
            for until, sum_of_s in dict(self._seconds[version]).items():
                seconds.add_metric((version, until), sum_of_s)
        yield from (requests, choices, tokens, seconds)
