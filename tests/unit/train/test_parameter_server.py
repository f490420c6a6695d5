"""The server of `parameterServer` without processes: who serves what, what a message holds, who waits, who connects."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ConfigError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.parameter_server.server import (
    Connection,
    Message,
    ParameterShare,
    _accept,
    _call,
    assign,
    read_numbers,
    write_numbers,
)
from sparktorch.train.strategies.registry import check_strategy


@pytest.mark.parametrize(
    ("sizes", "servers", "expected"),
    [
        ([3, 3, 3], 3, [0, 1, 2]),
        ([1, 9, 4, 4], 2, [1, 0, 1, 1]),
        ([0, 0], 2, [0, 0]),
    ],
)
def test_the_largest_tensors_are_served_first(sizes: list[int], servers: int, expected: list[int]) -> None:
    assert assign(sizes, servers) == expected


def test_a_frame_brings_tensors_of_any_type_and_shape_and_says_which_are_missing() -> None:
    like = [
        torch.randn(3),
        torch.randn((), dtype=torch.float64),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(7).bfloat16(),
        torch.empty(0, 4),
    ]
    sent, received = Message(like, numbers=2), Message(like, numbers=2)
    sent.push([0.1, 3e300], [None, *like[1:]])
    received.bytes.copy_(sent.bytes)
    missing, *gradients = received.gradients
    assert missing is None
    torch.testing.assert_close(gradients, like[1:], atol=0, rtol=0)
    assert received.numbers == [0.1, 3e300]
    assert not received.last
    sent.end()
    assert sent.last

    sent.store(like)
    received.bytes.copy_(sent.bytes)
    copies = [torch.zeros_like(tensor) for tensor in like]
    received.load(copies)
    torch.testing.assert_close(copies, like, atol=0, rtol=0)


def test_options_that_schedules_change_travel_as_numbers() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    first = torch.optim.AdamW([{"params": parameters[:1], "lr": 1}, {"params": parameters[1:]}], lr=0.1)
    second = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.5)
    first.param_groups[1]["betas"] = (0.8, 0.7)
    write_numbers(second.param_groups, read_numbers(first.param_groups))
    names = ("lr", "betas", "weight_decay")
    assert [[g[n] for n in names] for g in second.param_groups] == [[g[n] for n in names] for g in first.param_groups]


class Served:
    """A parameter of two numbers at zero, served to some ranks by SGD at rate 1."""

    def __init__(self, ranks: int, staleness: int | None) -> None:
        self.master = nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.master], lr=1.0)
        self.share = ParameterShare([self.master], self.optimizer, ranks=ranks, staleness=staleness)

    def push(self, rank: int, gradient: float | None) -> list[float]:
        frame = Message([self.master], numbers=3)
        frame.push([1.0, 0.0, 0.0], [None if gradient is None else torch.full((2,), gradient)])
        self.share.push(rank, frame)
        frame.load(found := [torch.zeros(2)])
        values: list[float] = found[0].tolist()
        return values

    def start(self, rank: int, gradient: float) -> tuple[threading.Thread, list[Any]]:
        replies: list[Any] = []

        def body() -> None:
            try:
                replies.append(self.push(rank, gradient))
            except ArithmeticError as error:
                replies.append(error)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread, replies


def test_without_a_bound_each_push_is_an_update_at_its_share_of_the_rate() -> None:
    served = Served(2, None)
    assert served.push(0, 4.0) == [-2.0, -2.0]
    assert served.push(0, 2.0) == [-3.0, -3.0]
    assert served.push(1, -6.0) == [0.0, 0.0]
    assert served.share.take_staleness() == [0, 0, 2]
    assert served.share.take_staleness() == []
    assert served.push(0, 0.0) == [0.0, 0.0]
    assert served.share.take_staleness() == [1]


@pytest.mark.parametrize("bound", [1, 2])
def test_a_rank_waits_when_it_is_further_ahead_than_the_bound(bound: int) -> None:
    served = Served(3, bound)
    for _ in range(bound):
        served.push(0, 3.0)
    thread, replies = served.start(0, 3.0)
    thread.join(0.1)
    assert thread.is_alive(), "two ranks have taken no step"
    served.push(1, 0.0)
    thread.join(0.1)
    assert thread.is_alive(), "one rank has taken no step"
    served.push(2, 3.0)
    thread.join(5)
    assert replies == [[-(bound + 2.0)] * 2], "the reply has seen what it waited for"


def test_with_a_bound_of_zero_the_mean_of_all_is_one_update() -> None:
    served = Served(3, 0)
    started = [served.start(rank, gradient) for rank, gradient in ((2, 1.0), (0, 2.0))]
    for thread, replies in started:
        thread.join(0.1)
        assert not replies
    assert served.push(1, 6.0) == [-3.0, -3.0]
    for thread, replies in started:
        thread.join(5)
        assert replies == [[-3.0, -3.0]]
    assert served.share.take_staleness() == [0, 0, 0]


def test_whoever_waits_learns_of_a_failure() -> None:
    served = Served(2, 0)
    thread, replies = served.start(0, 1.0)
    thread.join(0.1)
    assert thread.is_alive()
    cause = ArithmeticError("a peer is gone")
    served.share.fail(cause)
    served.share.fail(ArithmeticError("what follows from it"))
    thread.join(5)
    assert replies == [cause]
    with pytest.raises(ArithmeticError, match="a peer is gone"):
        served.push(1, 1.0)


@pytest.mark.parametrize(
    ("recipe", "config", "message", "param"),
    [
        ({"optimizer": lambda parameters, lr: None}, {}, "optimizer is no class", "optimizer"),
        ({}, {"precision": "fp16"}, "^precision.* does not go together with strategy", "precision"),
        (
            {},
            {"ema_decay": 0.9, "strategy_params": {"staleness": 1}},
            "^emaDecay.* does not go together with strategy",
            "emaDecay",
        ),
        ({}, {"strategy_params": {"staleness": -1}}, "staleness must be at least 0", "strategyParams.staleness"),
    ],
)
def test_what_the_strategy_does_not_go_with_is_refused(
    recipe: dict[str, Any], config: dict[str, Any], message: str, param: str | None
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_strategy(TrainConfig(strategy="parameterServer", **config), Recipe(module=nn.Module, **recipe))
    assert refused.value.where.get("param") == param


def test_sparse_gradients_are_sent_as_dense_ones() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 1])).sum().backward()
    frame = Message([layer.weight], numbers=0)
    frame.push([], [layer.weight.grad])
    assert frame.gradients[0].tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]  # type: ignore[union-attr]


TOKEN = bytes(range(16))


@pytest.fixture
def ends() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = _call(f"127.0.0.1 {listener.getsockname()[1]} {TOKEN.hex()}", rank=3)
        answering = _accept(listener, TOKEN, 1)
    assert list(answering) == [3]
    return calling, answering[3]


def close(*lines: Connection) -> None:
    for line in lines:
        line.shut()
        line.close()


def test_messages_larger_than_any_buffer_arrive_whole(ends: tuple[Connection, Connection]) -> None:
    sent = torch.randint(0, 255, (30_000_001,), dtype=torch.uint8)
    received = torch.zeros_like(sent)
    thread = threading.Thread(target=ends[0].send, args=(sent,))
    thread.start()
    ends[1].receive(received)
    thread.join()
    assert torch.equal(sent, received)
    close(*ends)


def test_who_does_not_know_the_token_is_turned_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        strangers[0].sendall(bytes(20))
        strangers[1].sendall(TOKEN)  # no rank follows
        strangers[1].shutdown(socket.SHUT_WR)
        known = _call(f"127.0.0.1 {port} {TOKEN.hex()}", rank=1)
        lines = _accept(listener, TOKEN, 1)
    assert list(lines) == [1]
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b""
    close(known, lines[1])


@pytest.mark.parametrize("breaking", [0, 1])
@pytest.mark.parametrize("sending", [False, True])
def test_a_broken_line_ends_what_waits_on_it(breaking: int, sending: bool, ends: tuple[Connection, Connection]) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        message = torch.zeros(50_000_000, dtype=torch.uint8)
        try:
            ends[0].send(message) if sending else ends[0].receive(message)
        except dist.DistNetworkError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    ends[breaking].shut()
    if breaking == 1:
        ends[1].close()
    thread.join(5)
    assert not thread.is_alive()
    assert "Connection closed by peer" in str(errors[0])
    close(*ends)
