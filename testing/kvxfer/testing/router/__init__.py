"""The contract of routers: what a router must do with requests of the OpenAI API so that their KV moves and nothing is held.

``CASES`` is the table of requests. ``check`` sends one of them through a deployment and says whether the contract is kept. The page
``docs/router-contract.md`` has the table, and ``kvxfer conformance --router`` runs all of it.
"""

from kvxfer.testing.router.cases import CASES, HangUp, HttpRequest, Moves, RouterCase, Texts
from kvxfer.testing.router.checking import Deployment, RouterResult, check
from kvxfer.testing.router.http import HttpAnswer, HttpServer, NoServerError

__all__ = [
    "CASES",
    "RouterCase",
    "Deployment",
    "HangUp",
    "HttpAnswer",
    "HttpServer",
    "Moves",
    "NoServerError",
    "HttpRequest",
    "RouterResult",
    "Texts",
    "check",
]
