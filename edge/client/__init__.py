"""Calls a node (or a gateway) from another process: `AsyncClient` in asyncio programs, `Client` in scripts and threads.

`endpoints.py` says which endpoint a call goes to, `caller.py` makes the calls, `blocking.py` is its twin for threads.
"""

from edge.client.blocking import Client
from edge.client.caller import Answer, AsyncClient

__all__ = ["Answer", "AsyncClient", "Client"]
