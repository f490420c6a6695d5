"""Connections between the ranks of a parameter server, within one process."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
import torch.distributed as dist

from sparktorch.train.strategies.parameter_server.connections import Connection, _accept, _call

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
