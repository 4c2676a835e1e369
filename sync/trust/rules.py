"""What may be believed, without I/O: versions and epochs only grow.

TUF's own rules live in python-tuf and its folder, which can be wiped or set back with the disk; these floors live in
the agent's journal and are asked after each refresh.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import AttackRefused
from sync.release import Desired


def raise_floors(floors: Mapping[str, int], seen: Mapping[str, int]) -> dict[str, int]:
    """The new floors after verified metadata of the versions `seen` (by role). Refuses an older one."""
    for role, version in seen.items():
        if version < floors.get(role, 0):
            problem = f"{role} metadata has version {version}, version {floors[role]} was seen before"
            raise AttackRefused("rollback", problem)
    return {**floors, **seen}


def check_epoch(last: Desired | None, new: Desired) -> None:
    """Desired state never goes back, and one epoch never says two things."""
    if last is None:
        return
    if new.epoch < last.epoch:
        problem = f"{new.model}: desired state of epoch {new.epoch}, epoch {last.epoch} was seen before"
        raise AttackRefused("rollback", problem)
    if new.epoch == last.epoch and new != last:
        raise AttackRefused("mix-and-match", f"{new.model}: epoch {new.epoch} now names another release than before")
