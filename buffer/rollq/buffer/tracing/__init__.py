"""Traces of groups for OpenTelemetry: their spans, and how these reach a collector. Off unless the user asks for it."""
