"""Which of a host's addresses its agent listens on; the interfaces are this machine's own."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from gemini_ft.errors import ConfigError
from gemini_ft.wire.network import bind_addresses, is_loopback
from gemini_ft.wire.worker_messages import HostInfo
from gemini_ft.worker.session import check_addresses


def outside() -> str:
    """An address of this machine that is not its loopback; the test is skipped where there is none."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family is socket.AF_INET and not entry.address.startswith("127."):
                return str(entry.address)
    pytest.skip("needs an address beside the loopback: ip link add d0 type dummy; ip address add 192.0.2.1/24 dev d0; ip link set d0 up")


class TestInterface:
    def test_by_name(self) -> None:
        assert bind_addresses(["lo"]) == ["127.0.0.1"]

    @pytest.mark.parametrize(("network", "address"), [("127.0.0.0/8", "127.0.0.1"), ("127.3.2.1/8", "127.0.0.1")])
    def test_by_network(self, network: str, address: str) -> None:
        assert bind_addresses([network]) == [address]

    @pytest.mark.skipif(not Path("/proc/net/if_inet6").read_text().strip(), reason="needs IPv6: sysctl net.ipv6.conf.lo.disable_ipv6=0")
    def test_by_an_ipv6_network(self) -> None:
        assert bind_addresses(["::1/128"]) == ["::1"]

    def test_several_by_name_and_network(self) -> None:
        assert bind_addresses([outside() + "/32", "lo"]) == [outside(), "127.0.0.1"]
        with pytest.raises(ConfigError, match=r"interface='lo,127.0.0.0/8' names one address twice \(lo is 127.0.0.1, 127.0.0.0/8 is 127"):
            bind_addresses(["lo", "127.0.0.0/8"])

    @pytest.mark.parametrize("name", ["ib7", "eth99", "300.1.1.0/24"])
    def test_that_is_not_there_is_refused_with_those_that_are(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"interface='{name}': no such interface, and not a CIDR; this host has .*lo \(127\.0\.0\.1"):
            bind_addresses([name])

    def test_in_a_network_that_this_host_is_not_in_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"interface='203\.0\.113\.0/24': no address of this host is in that network; it has .*lo"):
            bind_addresses(["203.0.113.0/24"])


class TestRoute:
    @pytest.mark.parametrize("master", ["127.0.0.1", "127.0.1.1", "localhost"])
    def test_to_a_master_on_the_loopback(self, master: str) -> None:
        assert is_loopback(bind_addresses((), master)[0])

    def test_comes_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        assert bind_addresses(()) == ["127.0.0.1"]

    def test_to_a_master_elsewhere(self) -> None:
        assert bind_addresses((), outside()) == [outside()]

    def test_to_our_own_name_is_not_the_loopback_that_etc_hosts_gives_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        outside()
        resolve = socket.getaddrinfo

        def as_debian_does(host: str, *args: object, **kwargs: object) -> object:
            return resolve("127.0.1.1" if host == "node17" else host, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", as_debian_does)
        assert not is_loopback(bind_addresses((), "node17")[0])

    def test_to_nowhere_is_refused_with_the_way_out(self) -> None:
        with pytest.raises(ConfigError, match=r"no route to the master 'no\.such\.host\.invalid' .*; set interface \(GEMINI_INTERFACE\)"):
            bind_addresses((), "no.such.host.invalid")


def host(name: str, machine: str, *addresses: str) -> HostInfo:
    first, *further = addresses
    return HostInfo(
        host=name, machine=machine, address=(first, 1), further=further, known=None, fingerprint="", memory_limit=1, memory_used=0
    )


def test_a_loopback_between_machines_is_refused() -> None:
    check_addresses([host("a", "m", "127.0.0.1"), host("b", "m", "127.0.0.1")])  # emulated hosts
    check_addresses([host("a", "m", "10.0.0.1"), host("b", "n", "10.0.0.2")])
    with pytest.raises(ConfigError, match=r"the agents of hosts \['a'\] listen on a loopback address, where other machines cannot"):
        check_addresses([host("a", "m", "127.0.0.1"), host("b", "n", "10.0.0.2")])
    with pytest.raises(ConfigError, match=r"the agents of hosts \['a'\] listen on a loopback address, where other machines cannot"):
        check_addresses([host("a", "m", "10.0.0.1", "127.0.0.1"), host("b", "n", "10.0.0.2")])
