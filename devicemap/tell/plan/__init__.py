"""What a call will do, told before it runs: where rows go, what travels, what waits, and what to change."""

from devicemap.tell.plan.plan import Plan
from devicemap.tell.plan.planner import explain_call
from devicemap.tell.plan.request import Asked, ask

__all__ = ["Asked", "Plan", "ask", "explain_call"]
