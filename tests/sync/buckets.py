"""An S3 server in this process (moto), with buckets in it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import urllib.request
from collections.abc import Iterator
from unittest import mock

from moto.server import ThreadedMotoServer

_numbers = itertools.count(1)


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Its URL; the environment leads there, with credentials of no worth."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        settings = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "no-secret-at-all",
            "AWS_REGION": "us-east-1",
        }
        with mock.patch.dict(os.environ, settings):
            yield url
    finally:
        server.stop()


def new_bucket(url: str) -> str:
    """The address of an empty prefix."""
    name = f"parameters-{next(_numbers)}"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT")):
        return f"s3://{name}/fleet/a"
