"""Traces groups for OpenTelemetry: makes spans and sends them to a collector. Tracing is off unless the user asks for
it."""
