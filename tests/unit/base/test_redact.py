"""What messages and MLflow show of values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from sparktorch import TorchRegressor
from sparktorch.base.redact import display_text
from sparktorch.errors import ConfigError
from sparktorch.tracking.listener import params
from sparktorch.train.callbacks import Callback


class Patient(Callback):
    """Has one."""

    def __repr__(self) -> str:
        return "Patient(epochs=3)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"hf_token": "abc", "apiKey": "abc", "db": {"password": "abc"}},
            "{'hf_token': '***', 'apiKey': '***', 'db': {'password': '***'}}",
        ),
        ({"tokenizer": "bert", "eos_token": 7}, "{'tokenizer': 'bert', 'eos_token': 7}"),
        (
            {"aws_access_key_id": "abc", "Authorization": "abc", "hf_token": ["abc", ("abc",)]},
            "{'aws_access_key_id': '***', 'Authorization': '***', 'hf_token': ['***', ('***',)]}",
        ),
        ("https://host/c?part=1&sig=a%2Fb&X-Amz-Signature=abc", "'https://host/c?part=1&sig=***&X-Amz-Signature=***'"),
        (["postgresql://me:s3@cret@host/db", (1,)], "['postgresql://me:***@host/db', (1,)]"),
        ([Callback(), Patient()], "[Callback, Patient(epochs=3)]"),
        (partial(torch.optim.SGD, lr=0.1), "SGD(lr=0.1)"),
        ({"act": torch.nn.ReLU()}, "{'act': ReLU}"),
    ],
)
def test_a_value_is_shown_without_secrets_and_addresses(value: Any, text: str) -> None:
    assert display_text(value) == text


def test_mlflow_and_messages_show_no_secrets() -> None:
    estimator = TorchRegressor(module="torch.nn:Linear", moduleParams={"token": "abc"}, checkpointDir="s3://a:b@host/c")
    found = params(estimator)
    assert (found["module"], found["moduleParams"], found["checkpointDir"]) == (
        *("torch.nn:Linear", "{'token': '***'}"),
        "s3://a:***@host/c",
    )
    assert "s3cret" not in str(ConfigError("'mysql://me:s3cret@db/x' cannot be opened", hint="x"))
