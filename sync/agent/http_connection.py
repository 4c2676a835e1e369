"""One keep-alive HTTP/1.1 connection to the web server that a store's folder lies behind. Owns `http.client`.

Knows requests, redirects and proxies, and nothing of ranges. Redirects lead only to the same server. A proxy of the
environment (`http_proxy`, `https_proxy`, `no_proxy`) is used, except to this machine. `cut` may come from any thread.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import socket
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import quote, unquote, urljoin, urlsplit

from common.errors import ConfigError, FetchError

DIAL_S: Final = 10.0
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MOST_REDIRECTS: Final = 3
_GONE: Final = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, ConnectionAbortedError)
_DRAIN_BYTES: Final = 64 << 10  # of an answer that nobody wants: cheaper to read than a new connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a store is: `path` ends with a slash."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises `ConfigError`. A password in an address would end up in logs: there is no place for one."""
        accepted = "http://HOST[:PORT]/PATH or https://..., without a user, a query or a fragment"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ConfigError("sync", "source", f"is not an address: {exc}", accepted) from exc
        if parts.username is not None or parts.password is not None:
            raise ConfigError("sync", "source", "has a user name or a password in it", accepted)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError("sync", "source", f"got {url!r}", accepted)
        default = 443 if parts.scheme == "https" else 80
        path = f"{parts.path.rstrip('/')}/"
        return cls(scheme=parts.scheme, host=parts.hostname, port=default if port is None else port, path=path)

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def target(self, name: str) -> str:
        return self.path + quote(name)

    def redirected(self, target: str, location: str) -> str | None:
        """The target that a redirect leads to; None where that is another server's."""
        moved = urlsplit(urljoin(self.origin + target, location))
        try:
            port = moved.port or (443 if moved.scheme == "https" else 80)
        except ValueError:
            return None
        if (moved.scheme, moved.hostname, port) != (self.scheme, self.host, self.port):
            return None
        return (moved.path or "/") + (f"?{moved.query}" if moved.query else "")


class Answer:
    """A response whose body is read piece by piece. `length`: what is announced of the body, None where nothing is."""

    def __init__(self, response: http.client.HTTPResponse, is_cut: Callable[[], bool]) -> None:
        self._response, self._is_cut = response, is_cut
        self.status, self.headers, self.length = response.status, response.headers, response.length
        self._left = response.length

    def read(self, most: int) -> bytes:
        """Some bytes, at most `most`; none at the end. Raises `http.client.IncompleteRead` where it ends early."""
        if most <= 0 or self._left == 0:
            return b""
        data = self._response.read1(most)
        if not data and (self._left is not None or self._is_cut()):
            raise http.client.IncompleteRead(b"", self._left)
        if self._left is not None:
            self._left -= len(data)
        return data

    def is_read(self) -> bool:
        """Reads what is left where that is little; False: the connection is of no more use."""
        left = _DRAIN_BYTES
        while left > 0 and (data := self.read(left)):
            left -= len(data)
        is_read = left > 0 and self._left in (None, 0)
        if is_read:
            self._response.close()
        return is_read


class HttpConnection:
    """Dialled at the first request, and again whenever the server has closed it. Requests one after the other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._proxy = _proxy_for(endpoint)
        self._http: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._socket: socket.socket | None = None
        self._is_cut = False

    def get(self, name: str, headers: dict[str, str], *, timeout_s: float) -> Answer:
        """Any status but a redirect. `timeout_s`: of each wait for the server. Raises `OSError`,
        `http.client.HTTPException`, or `FetchError` for a redirect that is not followed."""
        target = self._endpoint.target(name)
        for _ in range(_MOST_REDIRECTS + 1):
            answer = Answer(self._request(target, headers, timeout_s), lambda: self._is_cut)
            if answer.status not in _REDIRECTS:
                return answer
            location = answer.headers.get("location", "")
            moved = self._endpoint.redirected(target, location)
            if moved is None:
                server = urlsplit(urljoin(self._endpoint.origin, location)).netloc.rpartition("@")[2]
                problem = f"{self._endpoint.origin} redirects to another server ({server!r}), which is not asked"
                raise FetchError(name, problem, is_permanent=True)
            target = moved
            if not answer.is_read():
                self.drop()
        raise FetchError(name, f"{self._endpoint.origin} redirects in circles", is_permanent=True)

    def _request(self, target: str, headers: dict[str, str], timeout_s: float) -> http.client.HTTPResponse:
        is_reused = self._http is not None
        try:
            return self._send(target, headers, timeout_s)
        except _GONE:
            self.drop()
            if not is_reused:
                raise
        return self._send(target, headers, timeout_s)  # the server had closed an idle connection

    def _send(self, target: str, headers: dict[str, str], timeout_s: float) -> http.client.HTTPResponse:
        if self._http is not None and self._http.sock is None:  # the last answer was the last on that connection
            self.drop()
        if self._http is None:
            self._is_cut = False
            self._http = self._dial(timeout_s)
            self._socket = self._http.sock
        if self._socket is not None:
            self._socket.settimeout(timeout_s)
        headers = {"accept-encoding": "identity", "user-agent": "outrider", **headers}
        if self._proxy is not None and self._endpoint.scheme == "http":
            target, headers = self._endpoint.origin + target, {**headers, **self._proxy.headers}
        self._http.request("GET", target, headers=headers)
        self._response = self._http.getresponse()
        return self._response

    def _dial(self, timeout_s: float) -> http.client.HTTPConnection:
        one, proxy = self._endpoint, self._proxy
        host, port = (one.host, one.port) if proxy is None else (proxy.host, proxy.port)
        connection: http.client.HTTPConnection
        if one.scheme == "http":
            connection = http.client.HTTPConnection(host, port, timeout=min(DIAL_S, timeout_s))
        else:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=min(DIAL_S, timeout_s), context=context)
            if proxy is not None:
                connection.set_tunnel(one.host, one.port, proxy.headers)
        connection.connect()
        return connection

    def drop(self) -> None:
        """The next request dials anew."""
        for one in (self._response, self._http):
            if one is not None:
                one.close()
        self._response = self._http = self._socket = None

    def cut(self) -> None:
        """Breaks off whatever is running, which then fails with an `OSError` or an early end."""
        self._is_cut, sock = True, self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's: that takes the reader's state away


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proxy:
    host: str
    port: int
    headers: dict[str, str]


def _proxy_for(endpoint: Endpoint) -> _Proxy | None:
    url = urllib.request.getproxies().get(endpoint.scheme)
    if not url or _is_loopback(endpoint.host) or urllib.request.proxy_bypass(f"{endpoint.host}:{endpoint.port}"):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    headers = {}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["proxy-authorization"] = f"Basic {base64.b64encode(user).decode()}"
    return _Proxy(host=parts.hostname or "", port=parts.port or 80, headers=headers)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
