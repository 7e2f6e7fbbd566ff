"""Handling of Ctrl-C, SIGTERM and SIGHUP: a run stops where no work is lost, and no signal is missed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# Exit code of a command that was stopped and can be continued: EX_TEMPFAIL of sysexits.h. A second signal gives 130.
STOPPED = 75
ASKING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # Ctrl-C, `kill`, a closed terminal
TOGETHER = 1.0  # seconds in which several signals mean one


class CanGoOn(RuntimeError):
    """The end of a run for an external reason, with a checkpoint to continue from: a command ends with STOPPED."""


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def heeding_interrupts(*others: signal.Signals) -> Iterator[Callable[[], None]]:
    """Let Ctrl-C, and other signals, end the `with` block; yield a check to be called now and then.

    A KeyboardInterrupt within a callback from C is printed and lost (LLVM calls back when it has compiled a function,
    and only then can Python handle a signal): the check raises it again.
    """
    heard = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard = True
        raise KeyboardInterrupt

    def check() -> None:
        if heard:
            raise KeyboardInterrupt

    with _handled(interrupt, signal.SIGINT, *others):
        yield check
    check()


@contextmanager
def finishing_first(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Stop at Ctrl-C, SIGTERM or SIGHUP (a closed terminal), but only after the step; yield a check for it.

    A second Ctrl-C or SIGTERM interrupts at once, but not a SIGHUP, or one within TOGETHER: shells and `timeout` send
    several that mean one.

    say   prints a line
    """
    asked_at = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at:
            if number == signal.SIGHUP or time.monotonic() < asked_at + TOGETHER:
                return
            raise KeyboardInterrupt
        asked_at = time.monotonic()
        with suppress(RuntimeError, OSError):  # in the middle of a line to the same stream, or the terminal is gone
            say("stopping after this step, and saving; a second signal stops at once without saving")

    with _handled(ask, *ASKING):
        yield lambda: bool(asked_at)


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the end; threads and processes that are started inside never receive them.

    They inherit the blocked signals. Older threads still receive them, and Python then interrupts the main thread: so
    handlers hold these signals back until the end, too.
    """
    heard = set()

    def remember(number: int, frame: FrameType | None) -> None:
        heard.add(number)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        with _handled(remember, *ASKING):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in heard:
            signal.raise_signal(number)


@contextmanager
def _handled(handler: Handler, *signals: signal.Signals) -> Iterator[None]:
    """Handle these signals, unless they are ignored, or handled by a program that Python runs in (which Python does not
    know, and could not set again); only Python's main thread may set handlers.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in signals if main}
    before = {number: former for number, former in before.items() if former not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
