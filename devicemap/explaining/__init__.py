"""What a call will do, told before it runs: where rows go, what travels, what waits, and what to change."""

from devicemap.explaining.asking import Asked, ask
from devicemap.explaining.planning import explain_call
from devicemap.explaining.plans import Plan

__all__ = ["Asked", "Plan", "ask", "explain_call"]
