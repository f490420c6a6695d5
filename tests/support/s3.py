"""An object store on the loopback interface, with the addresses and credentials that reach it and no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

from tests.support.ranks import HOST


@contextmanager
def object_store(bucket: str) -> Iterator[dict[str, str]]:
    """Serves S3 with an empty bucket; yields the environment of those who use it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it notes every request
    server = ThreadedMotoServer(HOST, 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name=environment["AWS_DEFAULT_REGION"],
            aws_access_key_id="tests",
            aws_secret_access_key="tests",
        )
        client.create_bucket(Bucket=bucket)
        client.close()
        yield environment
    finally:
        server.stop()
