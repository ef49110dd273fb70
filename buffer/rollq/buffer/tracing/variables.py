"""OpenTelemetry's environment variables, as far as rollq reads them itself. Pure."""

from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


def endpoint_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that names a collector, and its value; empty strings if no traces are wanted."""
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    return ("", "") if is_off else _first(environ, ENDPOINTS)


def other_protocol(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that asks for a protocol that rollq lacks, and its value; empty strings if there is none."""
    name, protocol = _first(environ, PROTOCOLS)
    return ("", "") if protocol in ("", PROTOCOL) else (name, protocol)


def shown_endpoint(url: str) -> str:
    """An endpoint without the parts that may be secret: user, password, query."""
    try:
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        return "the collector"


def redacted(text: str, environ: Mapping[str, str]) -> str:
    """A text from the SDK, without the secret parts of the endpoint and the headers."""
    for secret in sorted(set(_secrets(environ)), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    return next(((name, environ[name]) for name in names if environ.get(name)), ("", ""))


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    for _, url in ((name, environ.get(name, "")) for name in ENDPOINTS):
        before, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
        yield from _forms(before if at else "", ":")
        yield from _forms(url.partition("?")[2], "&", "=")
    for name in HEADERS:
        yield from _forms(environ.get(name, ""), ",", "=")


def _forms(text: str, *separators: str) -> Iterator[str]:
    """A secret, its parts and its words, plain and decoded, except texts too short to be secret."""
    forms = [text]
    for separator in separators:
        forms += [part for form in forms for part in form.split(separator)]
    forms += map(unquote, tuple(forms))
    forms += " ".join(forms).split()
    yield from (form for form in forms if len(form) > 2)
