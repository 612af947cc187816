"""The mean reward of finished sessions over time, in a bounded number of points. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

POINTS_MAX = 120
WIDTH_S = 4.0
"""Of the time that one point stands for, at first: a run of a minute is a curve, and not one point for each session."""


class RewardPoint(msgspec.Struct, frozen=True, array_like=True):
    """`sessions` that finished at about the same time, the last of them at `t_unix_s`; the `mean` of their rewards."""

    t_unix_s: float
    sessions: int
    mean: float

    def joined(self, other: RewardPoint) -> RewardPoint:
        # By shares, since the sum of what is finite may be infinite.
        sessions = self.sessions + other.sessions
        mean = self.mean * (self.sessions / sessions) + other.mean * (other.sessions / sessions)
        return RewardPoint(max(self.t_unix_s, other.t_unix_s), sessions, mean)


class RewardCurve:
    """Covers everything that was added, in at most `POINTS_MAX` points: where they would be more, each point stands for
    twice the time from then on."""

    def __init__(self) -> None:
        self._width_s = WIDTH_S
        self._points: dict[int, RewardPoint] = {}

    def add(self, t_unix_s: float, reward: float) -> None:
        self._put(int(t_unix_s // self._width_s), RewardPoint(t_unix_s, 1, reward))
        while len(self._points) > POINTS_MAX:
            finer, self._points, self._width_s = self._points, {}, 2 * self._width_s
            for at, point in finer.items():
                self._put(at // 2, point)

    def _put(self, at: int, point: RewardPoint) -> None:
        before = self._points.get(at)
        self._points[at] = point if before is None else before.joined(point)

    def points(self) -> Mapping[str, RewardPoint]:
        """By the number of each, which only grows while the time that a point stands for stays the same."""
        return {str(at): point for at, point in self._points.items()}
