"""Which bytes: cache layouts, sharding and copy plans. Pure: no I/O, no torch, no clock."""

from kvxfer.geometry.cache import Cache, Group, Heads, Rank, Region, View
from kvxfer.geometry.plan import CopyPlan, Planner, PlanError, Runs, Sheet
from kvxfer.geometry.route import Claim, Incompatible, route

__all__ = [
    "Cache",
    "Claim",
    "CopyPlan",
    "Group",
    "Heads",
    "Incompatible",
    "PlanError",
    "Planner",
    "Rank",
    "Region",
    "Runs",
    "Sheet",
    "View",
    "route",
]
