"""Which bytes of one cache go where in another: layouts, sharding and copy plans. Pure: no I/O, no torch, no clock."""

from kvxfer.geometry.assignment import Incompatible, ShardAssignment
from kvxfer.geometry.cache import Cache, bands
from kvxfer.geometry.pattern import CopyPattern
from kvxfer.geometry.plan import CopyPlan, Planner
from kvxfer.geometry.region import Region
from kvxfer.geometry.route import Route, route
from kvxfer.geometry.segments import PlanError
from kvxfer.geometry.strided_copy import Runs, StridedCopy
from kvxfer.geometry.tensor import HOST
from kvxfer.geometry.turns import TokenTurns
from kvxfer.geometry.uncovered import UncoveredBytes, uncovered
from kvxfer.geometry.view import Heads, View
from kvxfer.geometry.view_group import LogicalCopy, ViewGroup
from kvxfer.values import Group, Rank

__all__ = [
    "HOST",
    "ViewGroup",
    "Cache",
    "ShardAssignment",
    "CopyPlan",
    "Group",
    "Heads",
    "UncoveredBytes",
    "Incompatible",
    "LogicalCopy",
    "PlanError",
    "Planner",
    "Rank",
    "Region",
    "Route",
    "Runs",
    "StridedCopy",
    "CopyPattern",
    "TokenTurns",
    "View",
    "bands",
    "uncovered",
    "route",
]
