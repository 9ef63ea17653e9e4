"""The scheduler core: feed(event) any number of times, then take_ready()."""

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.ready import CoreStats, CoreView, Ready
from scheduler_svc.core.scheduler import SchedulerCore

__all__ = ["CoreConfig", "CoreStats", "CoreView", "Ready", "SchedulerCore"]
