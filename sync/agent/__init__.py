"""The node's side of the parameter path: keeps what the node serves equal to what is signed as desired."""

from sync.agent.agent import Agent, AgentConfig, ModelStatus
from sync.agent.ports import GateVerdict, Installer, Staged

__all__ = ["Agent", "AgentConfig", "GateVerdict", "Installer", "ModelStatus", "Staged"]
