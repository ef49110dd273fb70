"""Connecting to a bucket of an S3-compatible object store.

The endpoint and the credentials come from AWS's environment variables (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, ...),
and go only to the endpoint. Needs `rollq[s3]`.
"""

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollq.buffer.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/(?!\.{1,2}(?:/|\Z))[\w.=+@-]+)*)/?")
"""`s3://bucket/prefix`."""
RETRIES, RETRY_S = 4, 60.0
ENDPOINT = re.compile(r"https?://(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::\d+)?(?:/[\w.~/-]*)?", re.ASCII)
"""The URL of a store. obstore panics at some other URLs."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The environment variables that may have the URL of the store; the first that is set counts."""


def open_bucket(url: str, timeouts: "ClientConfig", *, what: str, retries: int = RETRIES) -> "S3Store":
    """Return the store of the objects at `s3://bucket/prefix`. `what` names the objects in messages. A failing request
    is repeated up to `retries` times. Sends nothing to the store. Raises `ConfigError` for any other URL, for a wrong
    endpoint, for half a key, or without obstore.
    """
    if (found := URL.fullmatch(url)) is None:
        raise ConfigError(f"{url!r} is not the URL of a bucket and a prefix, such as s3://bucket/prefix")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError(f"{what} in an object store need obstore ({error}): pip install 'rollq[s3]'") from error
    variable = next(filter(os.environ.get, ENDPOINTS), "")
    endpoint = os.environ.get(variable, "https://")
    if variable and not _is_endpoint(endpoint):
        raise ConfigError(f"{variable} must begin with http:// or https://, and have a host, as in https://store:9000")
    try:
        return S3Store(
            found[1],
            prefix=found[2].strip("/") or None,
            client_options={**timeouts, "allow_http": endpoint.startswith("http://"), "connect_timeout": "10s"},
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=RETRY_S)},
        )
    except BaseError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{url}: {reason}: set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error


def _is_endpoint(url: str) -> bool:
    try:
        return ENDPOINT.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:  # a port above 65535, or no IPv6 address between brackets
        return False
