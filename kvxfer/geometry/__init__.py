"""Which bytes: cache layouts, sharding and copy plans. Pure: no I/O, no torch, no clock."""

from kvxfer.geometry.bundle import Bundle, Part
from kvxfer.geometry.cache import Cache, Heads, Region, View
from kvxfer.geometry.claim import Claim, Incompatible
from kvxfer.geometry.plan import CopyPlan, PlanError, Planner, Runs, Sheet
from kvxfer.geometry.rest import Hole, rest
from kvxfer.geometry.route import Route, route
from kvxfer.geometry.template import Template
from kvxfer.values import Group, Rank

__all__ = [
    "Bundle",
    "Cache",
    "Claim",
    "CopyPlan",
    "Group",
    "Heads",
    "Hole",
    "Incompatible",
    "Part",
    "PlanError",
    "Planner",
    "Rank",
    "Region",
    "Route",
    "Runs",
    "Sheet",
    "Template",
    "View",
    "rest",
    "route",
]
