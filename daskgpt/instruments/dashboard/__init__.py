"""A page "daskgpt" on Dask's own dashboard: `dask scheduler --preload daskgpt.instruments.dashboard`.

Dask imports a preload before it opens the dashboard, whose pages are what stands in its table then.
"""

from __future__ import annotations

from typing import Any

from daskgpt.schedulers.events import TOPIC

PAGE = TOPIC  # what stands behind the dashboard's address


def dask_setup(scheduler: Any) -> None:
    """Called by Dask once the scheduler is there: collect from here on, and add the page to the dashboard's menu."""
    from daskgpt.instruments.dashboard.collected import Collected

    scheduler.add_plugin(Collected(scheduler))
    if (pages := _pages(scheduler)) is not None and PAGE not in pages:
        pages.append(PAGE)


def _pages(scheduler: Any) -> list[str] | None:
    """The menu's names; None without Bokeh."""
    try:
        from distributed.dashboard.scheduler import template_variables
    except ImportError:
        return None
    found: list[str] = template_variables(scheduler)["pages"]
    return found


def _add_page() -> None:
    try:
        from distributed.dashboard.scheduler import applications

        from daskgpt.instruments.dashboard.dashboard_page import show
    except ImportError:  # Dask itself says what it needs for a dashboard
        return
    applications[f"/{PAGE}"] = show


_add_page()
