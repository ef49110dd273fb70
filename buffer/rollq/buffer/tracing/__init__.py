"""Traces of groups for OpenTelemetry: their spans, and how these reach a collector. Tracing is off unless the user asks
for it."""
