"""API keys and the tenants that they name: who a call comes from, and in whose name it may speak.

A key is 256 random bits (`new_key`), so its plain SHA-256 is what a configuration holds: nobody can guess such a key,
and a slow, salted hash, which is for passwords, would only cost each call milliseconds. A key that is shown is hashed
and its digest looked up: what a stranger could time is the digest of his own guess. No key is ever logged or echoed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import ConfigError, Forbidden, Unauthenticated
from common.request import DEFAULT_TENANT

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"  # what some clients send instead
CREDENTIALS = frozenset({AUTHORIZATION, API_KEY})
ANYONE = "*"  # in `may_act_for`

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_KEY = re.compile(r"[\x21-\x7e]{1,512}", re.ASCII)
_ACCEPTED = "accepted: an API key of this server, as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOptions:
    """A `[[tenants]]` table. With one or more of them, whoever calls over TCP needs a key."""

    name: str  # up to 64 of letters, digits, '.', '_', '-': whose answers are kept apart from those of others
    # SHA-256 (hex) of every key that is good: two while one takes the place of the other
    key_sha256: tuple[str, ...]
    # tenants in whose name it may call, as a node does at a gateway and a gateway at a worker; "*": any
    may_act_for: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_tenant(self.name) or self.name == DEFAULT_TENANT:
            raise ValueError(
                f"name {self.name[:80]!r} is no tenant's: letters, digits, '.', '_' and '-', at most 64, and not "
                f"{DEFAULT_TENANT!r}, which is who calls without a key"
            )
        if not self.key_sha256:
            raise ValueError(f"key_sha256 of tenant {self.name!r} is empty: `outrider keys new` makes a key")
        for digest in self.key_sha256:  # never echoed: somebody may have pasted the key itself
            if not _DIGEST.fullmatch(digest):
                raise ValueError(f"key_sha256 of tenant {self.name!r} must be 64 lower-case hexadecimal digits each")
        for name in self.may_act_for:
            if name != ANYONE and not is_tenant(name):
                raise ValueError(f"may_act_for of tenant {self.name!r} names {name[:80]!r}, which is no tenant's name")


def check_tenants(tenants: Sequence[TenantOptions]) -> None:
    """Raises ValueError where two of them have a name or a key in common."""
    names = [tenant.name for tenant in tenants]
    digests = [digest for tenant in tenants for digest in tenant.key_sha256]
    if len(set(names)) < len(names):
        raise ValueError(f"tenants must have different names, got {names}")
    if len(set(digests)) < len(digests):
        raise ValueError("tenants: one key_sha256 stands twice; each key names one tenant")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a call comes from. One that may act for others is a process of ours: its word on a call's reason counts."""

    tenant: str = DEFAULT_TENANT
    may_act_for: tuple[str, ...] = ()

    @property
    def is_hop(self) -> bool:
        return bool(self.may_act_for)

    def tenant_of(self, named: str) -> str:
        """Whose call it is, where its header names `named`. A stranger's word does not count; `Forbidden` where
        a process of ours names one that is not in its list: under its own name, answers would mix."""
        if not self.may_act_for or named in ("", DEFAULT_TENANT, self.tenant):
            return self.tenant
        if named in self.may_act_for or (ANYONE in self.may_act_for and is_tenant(named)):
            return named
        raise Forbidden(
            f"tenant {self.tenant!r} may not act for tenant {named[:80]!r}; accepted: {', '.join(self.may_act_for)}"
        )


ANY_CALLER, OUR_PROCESS = Caller(), Caller(DEFAULT_TENANT, (ANYONE,))


class Tenants(Protocol):
    def caller(self, headers: Mapping[str, str], *, is_local: bool) -> Caller:
        """Raises `Unauthenticated`. `is_local`: over a Unix socket, whose file says who may connect."""
        ...


class NoKeys:
    """No key is configured: every caller is the one tenant, and the servers are on loopback."""

    def __init__(self, caller: Caller = ANY_CALLER) -> None:
        self._caller = caller

    def caller(self, headers: Mapping[str, str], *, is_local: bool) -> Caller:
        return self._caller


class Keys:
    """The tenants of a configuration; `local` is who calls over a Unix socket and shows no key."""

    def __init__(self, tenants: Sequence[TenantOptions], *, local: Caller = ANY_CALLER) -> None:
        self._local = local
        self._by_digest = {
            bytes.fromhex(digest): Caller(tenant.name, tenant.may_act_for)
            for tenant in tenants
            for digest in tenant.key_sha256
        }

    def caller(self, headers: Mapping[str, str], *, is_local: bool) -> Caller:
        key = _key_of(headers)
        if key is None:
            if is_local:
                return self._local
            raise Unauthenticated(f"the call brings no API key; {_ACCEPTED}")
        caller = self._by_digest.get(_digest(key))
        if caller is None:
            raise Unauthenticated(f"the API key of the call is not known here; {_ACCEPTED}")
        return caller


def tenants_of(tenants: Sequence[TenantOptions], *, trusts_callers: bool = False) -> Tenants:
    """`trusts_callers`: who needs no key (on loopback without keys, over a Unix socket) is a process of ours."""
    keyless = OUR_PROCESS if trusts_callers else ANY_CALLER
    return Keys(tenants, local=keyless) if tenants else NoKeys(keyless)


def is_tenant(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def new_key() -> str:
    """256 random bits in the URL-safe alphabet, with a prefix by which people and scanners know what it is."""
    return f"outrider-{secrets.token_urlsafe(32)}"


def key_sha256(key: str) -> str:
    return _digest(key).hex()


def checked_key(key: str, source: str, path: str) -> str:
    """A key as it can travel in a header. Raises `ConfigError`, which does not contain it."""
    if not _KEY.fullmatch(key):
        raise ConfigError(source, path, "is no API key", "1 to 512 printable ASCII characters without spaces")
    return key


def read_key_file(path: str | None, source: str) -> str:
    """The key in the file that `api_key_file` of the process `source` names, empty without one. Raises `ConfigError`
    also where anybody but the file's owner may read it."""
    if path is None:
        return ""
    where = "api_key_file"
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1024).strip()
    except OSError as exc:
        raise ConfigError(source, where, f"{path}: {exc.strerror}", "a file that holds the key alone") from exc
    except UnicodeDecodeError:
        raise ConfigError(source, where, f"{path} is not text", "a file that holds the key alone") from None
    if mode & 0o077:
        raise ConfigError(source, where, f"{path} has mode {mode:04o}, so that others can read it", "mode 0600")
    return checked_key(text, source, f"{where}: {path}")


def _key_of(headers: Mapping[str, str]) -> str | None:
    text = headers.get(AUTHORIZATION)
    if text is None:
        return headers.get(API_KEY)
    scheme, _, key = text.strip().partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated(f"the call's authorization is not of the Bearer scheme; {_ACCEPTED}")
    return key.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
