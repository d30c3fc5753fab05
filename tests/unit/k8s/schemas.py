"""Schemas of third-party kinds, reduced to the fields used here; they forbid unknown keys.

They cover kinds of the Prometheus operator, cert-manager and kustomize.
"""

from tests.unit.k8s.overlays import Json

STRING: Json = {"type": "string", "minLength": 1}
STRINGS: Json = {"type": "object", "additionalProperties": STRING}


def mapping(*required: str, **properties: Json) -> Json:
    """Returns a schema with exactly these keys."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def items(schema: Json) -> Json:
    return {"type": "array", "items": schema, "minItems": 1}


def resource(version: str, kind: str, spec: Json) -> Json:
    return mapping(
        "apiVersion",
        "kind",
        "metadata",
        "spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=mapping("name", name=STRING),
        spec=spec,
    )


def kustomization(version: str, kind: str) -> Json:
    return mapping(
        "apiVersion",
        "kind",
        apiVersion={"const": f"kustomize.config.k8s.io/{version}"},
        kind={"const": kind},
        resources=items(STRING),
        components=items(STRING),
        patches=items(mapping("path", path=STRING)),
        configMapGenerator=items(
            mapping(
                "name",
                "files",
                "options",
                name=STRING,
                files=items(STRING),
                options=mapping(
                    "disableNameSuffixHash", "labels", disableNameSuffixHash={"const": True}, labels=STRINGS
                ),
            )
        ),
    )


def one_of(**properties: Json) -> Json:
    """Returns a schema of a mapping with exactly one of these keys."""
    return mapping(**properties) | {"minProperties": 1, "maxProperties": 1}


HOURS: Json = {"type": "string", "pattern": r"^[1-9]\d*h$"}
MONITORING = "monitoring.coreos.com/v1"
CERT_MANAGER = "cert-manager.io/v1"

SCHEMAS = {
    "PodMonitor": resource(
        MONITORING,
        "PodMonitor",
        mapping(
            "selector",
            "podMetricsEndpoints",
            selector=mapping("matchLabels", matchLabels=STRINGS),
            podTargetLabels=items(STRING),
            podMetricsEndpoints=items(
                mapping(
                    "port",
                    port=STRING,
                    path=STRING,
                    metricRelabelings=items(
                        mapping(
                            "sourceLabels",
                            "regex",
                            "targetLabel",
                            "replacement",
                            sourceLabels=items(STRING),
                            regex=STRING,
                            targetLabel=STRING,
                            replacement=STRING,
                        )
                    ),
                )
            ),
        ),
    ),
    "PrometheusRule": resource(
        MONITORING,
        "PrometheusRule",
        mapping(
            "groups",
            groups=items(
                mapping(
                    "name",
                    "rules",
                    name=STRING,
                    rules=items(
                        mapping(
                            "alert",
                            "expr",
                            "labels",
                            "annotations",
                            alert=STRING,
                            expr=STRING,
                            labels=mapping("severity", severity={"enum": ["critical", "warning"]}),
                            annotations=mapping("summary", summary=STRING, description=STRING),
                            **{"for": {"type": "string", "pattern": r"^\d+[smh]$"}},
                        )
                    ),
                )
            ),
        ),
    ),
    "Issuer": resource(
        CERT_MANAGER, "Issuer", one_of(selfSigned=mapping(), ca=mapping("secretName", secretName=STRING))
    ),
    "Certificate": resource(
        CERT_MANAGER,
        "Certificate",
        mapping(
            "secretName",
            "issuerRef",
            "privateKey",
            "duration",
            secretName=STRING,
            isCA={"type": "boolean"},
            commonName={"type": "string", "minLength": 1, "maxLength": 64},
            dnsNames=items({"type": "string", "pattern": r"^[a-z0-9-]+(\.[a-z0-9-]+)*$"}),
            duration=HOURS,
            renewBefore=HOURS,
            usages=items({"enum": ["digital signature", "server auth", "client auth"]}),
            privateKey=mapping(
                "algorithm",
                "size",
                algorithm={"const": "ECDSA"},
                size={"enum": [256, 384, 521]},
                rotationPolicy={"enum": ["Never", "Always"]},
            ),
            issuerRef=mapping("name", name=STRING, kind={"const": "Issuer"}, group={"const": "cert-manager.io"}),
        )
        | {"anyOf": [{"required": ["commonName"]}, {"required": ["dnsNames"]}]},
    ),
    "Kustomization": kustomization("v1beta1", "Kustomization"),
    "Component": kustomization("v1alpha1", "Component"),
}
