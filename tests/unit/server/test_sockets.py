"""Listening sockets: addresses that cannot be used."""

import pytest

from codex_workspace.common.errors import ConfigError
from codex_workspace.server.sockets import bind


def test_a_port_in_use_is_one_sentence() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_foreign_address_is_one_sentence(host: str) -> None:
    with pytest.raises(ConfigError, match=f"A2A_HOST/A2A_PORT: cannot listen on {host} port 0: .*; set A2A_HOST to"):
        bind(host, 0)
