"""Links of the twin: fair-share transfers in virtual time, because SimPy has no such resource.

n flows on a link of rate r get r/n each. Virtual time V advances by r/n; a flow of s bytes that joins at V ends when
V reaches V + s, so one heap and one rescheduled wake-up serve any number of flows (O(log n) a flow).
A message is a set-up time, which takes no bandwidth, and then its bytes: t(s) = setup + s / rate when alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from simpy import Environment, Event

REL_TOLERANCE = 1e-12  # flows due within this share of the virtual time end together


class FairLink:
    """One direction of a link, shared fairly.

    Attributes:
        rate_bytes_per_us: what all flows share.
        setup_us: delay of a message before its first byte.
        moved_bytes: bytes of finished flows.
        busy_us: time with at least one flow in its byte phase, up to the last change.
    """

    def __init__(self, env: Environment, rate_bytes_per_us: float, setup_us: float = 0.0) -> None:
        if not rate_bytes_per_us > 0:
            raise ValueError(f"rate_bytes_per_us={rate_bytes_per_us}: must be above 0")
        if not setup_us >= 0:
            raise ValueError(f"setup_us={setup_us}: must not be negative")
        self.rate_bytes_per_us = rate_bytes_per_us
        self.setup_us = setup_us
        self.moved_bytes = 0
        self.busy_us = 0.0
        self.on_change: Callable[[], None] | None = None
        self._env = env
        self._flows: list[tuple[float, int, int, Event]] = []
        self._virtual = 0.0
        self._updated_us = 0.0
        self._joined = 0
        self._generation = 0

    @property
    def active(self) -> int:
        """Flows in their byte phase."""
        return len(self._flows)

    def transfer(self, size_bytes: int) -> Event:
        """An event that succeeds with size_bytes when the message has arrived."""
        if size_bytes < 0:
            raise ValueError(f"size_bytes={size_bytes}: must not be negative")
        done = Event(self._env)
        if self.setup_us:
            self._after(self.setup_us, lambda _: self._join(size_bytes, done))
        else:
            self._join(size_bytes, done)
        return done

    def set_rate(self, rate_bytes_per_us: float) -> None:
        """Changes the rate from now on; running flows go on at the new one."""
        if rate_bytes_per_us == self.rate_bytes_per_us:
            return
        self._advance()
        self.rate_bytes_per_us = rate_bytes_per_us
        self._reschedule()

    def account(self, size_bytes: int, busy_us: float) -> None:
        """Books bytes whose time was computed in closed form."""
        self.moved_bytes += size_bytes
        self.busy_us += busy_us

    def _after(self, delay_us: float, action: Callable[[Any], None]) -> None:
        wake = self._env.timeout(delay_us)
        assert wake.callbacks is not None
        wake.callbacks.append(action)

    def _advance(self) -> None:
        if self._flows:
            elapsed = self._env.now - self._updated_us
            self._virtual += elapsed * self.rate_bytes_per_us / len(self._flows)
            self.busy_us += elapsed
        else:
            self._virtual = 0.0  # an idle link forgets, so that rounding can't build up
        self._updated_us = self._env.now

    def _join(self, size_bytes: int, done: Event) -> None:
        self._advance()
        self._joined += 1
        heapq.heappush(self._flows, (self._virtual + size_bytes, self._joined, size_bytes, done))
        if self.on_change and len(self._flows) == 1:
            self.on_change()
        self._reschedule()

    def _reschedule(self) -> None:
        self._generation += 1
        if not self._flows:
            return
        mine = self._generation
        left = max(0.0, self._flows[0][0] - self._virtual)
        self._after(left * len(self._flows) / self.rate_bytes_per_us, lambda _: self._wake(mine))

    def _wake(self, generation: int) -> None:
        if generation != self._generation:
            return  # someone joined or the rate changed since this wake-up was set
        self._advance()
        # The first flow is due now by construction; the clock's rounding must not make it wait for a second wake-up.
        self._virtual = max(self._virtual, self._flows[0][0])
        due = self._virtual * (1.0 + REL_TOLERANCE)
        while self._flows and self._flows[0][0] <= due:
            _, _, size_bytes, done = heapq.heappop(self._flows)
            self.moved_bytes += size_bytes
            done.succeed(size_bytes)
        if self.on_change and not self._flows:
            self.on_change()
        self._reschedule()


class DuplexLink:
    """Two directions that together may be slower than the sum of both, as PCIe is.

    While both are busy, each gets its share of both_bytes_per_us in proportion to its own rate.
    """

    def __init__(
        self,
        env: Environment,
        down_bytes_per_us: float,
        up_bytes_per_us: float,
        both_bytes_per_us: float,
        setup_us: float = 0.0,
    ) -> None:
        self.down = FairLink(env, down_bytes_per_us, setup_us)
        self.up = FairLink(env, up_bytes_per_us, setup_us)
        self._alone = (down_bytes_per_us, up_bytes_per_us)
        self._slowdown = min(1.0, both_bytes_per_us / (down_bytes_per_us + up_bytes_per_us))
        self._factor = 1.0
        if self._slowdown < 1.0:
            self.down.on_change = self.up.on_change = self._balance

    def _balance(self) -> None:
        factor = self._slowdown if self.down.active and self.up.active else 1.0
        if factor == self._factor:
            return
        self._factor = factor
        for link, rate in zip((self.down, self.up), self._alone, strict=True):
            link.set_rate(rate * factor)
