"""The chain: in which order relays pass chunks on, and whom each may ask.

Invariants:
- within the plan under which a version began, a relay asks only relays before it: no cycle can form;
- a complete holder may be asked by anybody: it needs nothing from anyone;
- relays keep their places from plan to plan; newcomers join at the tail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paramserver.core.records import Epoch, Plan


def next_plan(previous: Plan | None, epoch: Epoch, master: str, members: Collection[str]) -> tuple[Plan, str]:
    """The plan for the next version and why it differs from `previous` ("" when it does not)."""
    kept = [name for name in (previous.order if previous else ()) if name in members and name != master]
    joined = sorted(set(members) - set(kept) - {master})
    order = (master, *kept, *joined)
    if previous is not None and previous.order == order and previous.epoch == epoch:
        return previous, ""
    number = previous.number + 1 if previous is not None and previous.epoch == epoch else 1
    return Plan(epoch, number, order), _reason(previous, epoch, order)


def _reason(previous: Plan | None, epoch: Epoch, order: Sequence[str]) -> str:
    if previous is None:
        return "first plan"
    left = [name for name in previous.order if name not in order]
    joined = [name for name in order if name not in previous.order]
    parts = [f"left: {', '.join(left)}"] if left else []
    parts += [f"joined: {', '.join(joined)}"] if joined else []
    parts += ["new master"] if previous.epoch != epoch else []
    return "; ".join(parts) or "new order"


def sources(me: str, plan: Plan, holders: Collection[str]) -> tuple[str, ...]:
    """Whom to ask, best first: the nearest upstream of the plan, then further up, then complete holders.

    One who is not in the plan (it joined later) asks complete holders first, then the chain from its tail up.
    """
    complete = sorted(set(holders) - {me})
    if me in plan.order:
        upstream = list(reversed(plan.order[: plan.order.index(me)]))
        return (*upstream, *(name for name in complete if name not in upstream))
    return (*complete, *(name for name in reversed(plan.order) if name not in complete))
