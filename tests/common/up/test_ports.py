import socket

import pytest

from common.errors import ConfigError
from common.up.ports import fixed, free

EPHEMERAL_START = 32768  # Linux's default net.ipv4.ip_local_port_range begins here


def test_free_ports_differ_can_be_bound_and_are_not_the_kernels_to_give_away() -> None:
    ports = free([f"p{number}" for number in range(12)])
    assert len(set(ports.values())) == 12
    assert all(1024 < port < EPHEMERAL_START for port in ports.values())
    for port in ports.values():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_a_fixed_port_in_use_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} \(a\) is in use"):  # its neighbours may be taken too
            fixed(["a", "b"], port)
