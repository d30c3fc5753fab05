"""Spans by OpenTelemetry, of what a process does for the sessions that are traced."""
