"""What of a request is traced: whether at all, and which events of its rounds. Pure; OpenTelemetry is elsewhere."""
